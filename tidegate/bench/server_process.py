"""A real `tidegate serve` in a process of its own, on a free port, for as long as a benchmark needs it."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from types import TracebackType

from tidegate.bench.client import Endpoint
from tidegate.config import ConfigError

_END_TIMEOUT_S = 40.0


class ServerProcess:
    """A context manager: inside it the server is ready."""

    def __init__(self, arguments: Sequence[str] = (), name: str = "tidegate") -> None:
        self._arguments = list(arguments)
        self._name = name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Endpoint:
        """Raises ConfigError with the server's own words when it does not start."""
        command = [sys.executable, "-c", "from tidegate.cli import main; main()", "serve", "--port", "0"]
        process = self._process = subprocess.Popen(
            [*command, *self._arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if " at http://" in line:
                    return Endpoint.parse(f"{self._name}={line.rpartition(' at ')[2].strip()}")
        except BaseException:
            self._end()
            raise
        self._end()
        self._log.seek(0)
        words = self._log.read().decode(errors="replace").strip().splitlines()
        raise ConfigError(words[-1].removeprefix("tidegate: ") if words else "tidegate serve did not start")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()
        self._log.close()

    def _end(self) -> None:
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
