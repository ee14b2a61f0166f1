"""A real `tidegate serve` in a process of its own, for the tests that kill, stop and overload it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

_POLL_S = 0.02


class ServedProcess:
    """Starts at once; `wait_ready` returns the address. What it printed is in `out` and `err`."""

    def __init__(self, *arguments: str, tmp: Path, env: dict[str, str] | None = None) -> None:
        self.tmp = tmp
        self.url = ""
        self.out: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from tidegate.cli import main; main()", "serve", "--port", "0", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=(tmp / "stderr.txt").open("wb"),
            text=True,
            env={**os.environ, "TMPDIR": str(tmp), **(env or {})},
        )
        # A server that never speaks must not hang the suite.
        self._guard = threading.Timer(60.0, self.process.kill)
        self._guard.start()

    @property
    def err(self) -> str:
        return (self.tmp / "stderr.txt").read_text()

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def wait_ready(self) -> str:
        """Read until the banner is there."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.out.append(line.rstrip())
            if " serves " in line:
                self.url = line.split()[-1]
            if "try it" in line:
                return self.url
        raise AssertionError(f"the server ended before it was ready: {self.err}")

    def worker(self) -> psutil.Process:
        """The worker process, as soon as there is one."""
        while self.process.poll() is None:
            for child in psutil.Process(self.process.pid).children():
                # A child that is being replaced, or that converts the model and ends, has no command line for a moment.
                with contextlib.suppress(psutil.NoSuchProcess):
                    if "tidegate-worker" in child.cmdline():
                        return child
            time.sleep(_POLL_S)
        raise AssertionError(f"the server ended: {self.err}")

    def until(self, is_so: Callable[[], bool]) -> None:
        """Ask again and again; the guard ends a wait that is in vain."""
        while not is_so():
            assert self.process.poll() is None, self.err
            time.sleep(_POLL_S)

    def wait(self) -> int:
        try:
            return self.process.wait(60)
        finally:
            self._guard.cancel()

    def close(self) -> None:
        self._guard.cancel()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
