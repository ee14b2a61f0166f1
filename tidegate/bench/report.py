"""How results leave a benchmark: JSON to a file or stdout, tables and progress to the terminal.

With JSON on stdout the tables go to stderr, so that the output can be piped.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from tidegate.config import ConfigError

_FILE_WIDTH = 132


def console_for(json_path: str | None) -> Console:
    console = Console(stderr=json_path == "-", highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, _FILE_WIDTH)  # a log file has room for whole tables
    return console


def check_writable(path: str | None) -> None:
    """Raises ConfigError before minutes are spent on a result that cannot be kept."""
    if path is not None and path != "-" and not Path(path).absolute().parent.is_dir():
        raise ConfigError(f"cannot write {path}: no such folder")


def write_json(document: object, json_path: str | None) -> None:
    """Raises ConfigError."""
    if json_path is None:
        return
    text = json.dumps(document, indent=2, allow_nan=False)
    if json_path == "-":
        print(text, flush=True)
        return
    write_text(json_path, text + "\n")


def write_text(path: str, text: str) -> None:
    """Raises ConfigError."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def plain_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """The first column is names, the others are figures."""
    table = Table(title=title, title_justify="left", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*row)
    return table


def percentile(ordered: Sequence[float], share: float) -> float:
    """Linear between the two nearest of an ascending, non-empty sequence."""
    place = (len(ordered) - 1) * share
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def paired_ratio(pairs: Sequence[dict[str, Any]], name: str) -> float:
    """The median over pairs of ours / theirs."""
    return round(float(median(pair["ours"][name] / pair["theirs"][name] for pair in pairs)), 4)
