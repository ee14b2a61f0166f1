"""`tidegate usage`: who has used how much, as a table, CSV or JSON."""

from __future__ import annotations

import csv
import io
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any, Literal

from tidegate.config import ConfigError, parse_duration
from tidegate.usage.store import HOUR_S, Key

By = Literal["tenant", "tier", "day", "hour"]
_NAMES: dict[By, Callable[[Key], str]] = {
    "tenant": lambda key: key[1] or "(no tenant)",
    "tier": lambda key: key[2],
    "day": lambda key: datetime.fromtimestamp(key[0] * HOUR_S, UTC).strftime("%Y-%m-%d"),
    "hour": lambda key: datetime.fromtimestamp(key[0] * HOUR_S, UTC).strftime("%Y-%m-%d %H:00"),
}
_FIRST = ("requests", "prompt_tokens", "output_tokens", "cached_tokens", "downgrades", "refusals")


def usage_rows(usage: Counter[Key], by: Iterable[str]) -> list[dict[str, Any]]:
    """One row a group: its names, then the sums. `requests` is split by outcome (`requests:stop`), and `refusals` by
    reason; their totals come first. Raises ConfigError for an unknown group."""
    groups = [_group(name) for name in by]
    sums: defaultdict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
    for key, amount in usage.items():
        row = sums[tuple(_NAMES[group](key) for group in groups)]
        row[key[3]] += amount
        kind, _, detail = key[3].partition(":")
        if detail:
            row[kind] += amount
    details = sorted({name for row in sums.values() for name in row} - set(_FIRST))
    return [
        {**dict(zip(groups, names, strict=True)), **{name: sums[names][name] for name in (*_FIRST, *details)}}
        for names in sorted(sums)
    ]


def print_table(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for name in rows[0] if rows else ():
        table.add_column(name, justify="left" if name in _NAMES else "right")
    for row in rows:
        table.add_row(*(f"{value:,}" if isinstance(value, int) else value for value in row.values()))
    Console(width=max(80, 26 * len(table.columns))).print(table)


def as_csv(rows: list[dict[str, Any]]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def parse_since(text: str | None) -> float:
    """A day (2024-05-01), a moment in ISO form (UTC if it says nothing else), or a time ago (24h, 7d), as Unix time."""
    if text is None:
        return 0.0
    try:
        if text.endswith("d") and text[:-1].isdigit():
            return time.time() - int(text[:-1]) * 86_400
        if text[:1].isdigit() and "-" not in text:
            seconds = parse_duration(text)
            return time.time() - float(str(seconds))
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"--since takes a day like 2024-05-01 or a time ago like 24h or 7d, not {text!r}") from None
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()


def _group(name: str) -> By:
    for known in _NAMES:
        if name == known:
            return known
    raise ConfigError(f"--by takes {', '.join(_NAMES)}, not {name!r}")
