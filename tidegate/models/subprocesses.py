"""Starting child.py: its output goes to a file, its growth is watched, and it never outlives the call."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class ChildResult:
    """`returncode` is negative for a signal. `output` is stdout and stderr, the last part of it."""

    returncode: int
    output: str


def run_child(
    verb: str,
    arguments: list[str],
    *,
    folder: Path,
    env: Mapping[str, str] | None = None,
    on_tick: Callable[[], None] = lambda: None,
) -> ChildResult:
    """Run child.py in `folder`, calling `on_tick` some ten times a second until it ends."""
    log = folder / "child.log"
    script = Path(__file__).with_name("child.py")
    command = [sys.executable, "-P", str(script), str(os.getpid()), verb, *arguments]
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=folder,
            env=None if env is None else dict(env),
        )
        try:
            while True:
                try:
                    returncode = process.wait(_POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    on_tick()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    return ChildResult(returncode, log.read_text(encoding="utf-8", errors="replace")[-20_000:])
