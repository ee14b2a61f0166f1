"""What the operator sees while models are fetched, checked and converted: one bar (or line) on stderr a piece of work.

Owns: the look of it. Never writes to stdout, which belongs to --json and to answers.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def byte_bar(description: str, total_bytes: int | None, *, show: bool) -> Iterator[Callable[[int], None]]:
    """Yields a function to be told the number of bytes done so far. Without a known total the bar only moves.

    Where stderr is no terminal, one line says what is being done.
    """
    if not show:
        yield lambda done: None
        return
    if not sys.stderr.isatty():
        print(f"{description} ...", file=sys.stderr, flush=True)
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TransferSpeedColumn

    columns = [TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()]
    if total_bytes is not None:
        columns[2:2] = [DownloadColumn(), TransferSpeedColumn()]
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(description, total=total_bytes)
        yield lambda done: progress.update(task, completed=done)
        if total_bytes is not None:
            progress.update(task, completed=total_bytes)
