"""Starts a worker process, listens to it, and starts it again when it dies.

    spawn ──> loading ──Ready──> serving ──death──> lost ──backoff──> spawn ...
                 └──StartFailed or death──> failed ──backoff──> spawn ... (the first start: no second try)

Owns: the process, its link, and the pipe by which the worker notices our own end. A shell: asyncio and processes.
Never does: decide what becomes of a dead worker's requests (the gate does; it hears `worker_lost`).
Invariant: every spawned process has been waited for when `stop` returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
from typing import Protocol

from tidegate.config import Config
from tidegate.models.source import ModelSource
from tidegate.version import __version__
from tidegate.worker.messages import (
    PROTOCOL_VERSION,
    FromWorker,
    Loading,
    Ready,
    Shutdown,
    StartFailed,
    StepReport,
    ToWorker,
    WorkerInfo,
)
from tidegate.worker.spec import WorkerSpec
from tidegate.worker.transport import WorkerLink

PROCESS_NAME = "tidegate-worker"
_FIRST_BACKOFF_S = 0.25
_MAX_BACKOFF_S = 30.0
_STOP_TIMEOUT_S = 10.0

log = logging.getLogger("tidegate.supervisor")


class WorkerListener(Protocol):
    """Who is told; all calls come on the event loop."""

    def worker_loading(self, worker_id: str, message: str) -> None: ...

    def worker_ready(self, info: WorkerInfo) -> None: ...

    def worker_report(self, worker_id: str, report: StepReport) -> None: ...

    def worker_lost(self, worker_id: str, message: str) -> None:
        """A worker that was ready is dead."""
        ...

    def worker_failed(self, worker_id: str, message: str) -> None:
        """A worker did not get ready; `message` is the line for the operator."""
        ...


class WorkerSupervisor:
    """One worker. `start` and `stop` are called once each, on the event loop of the main thread: the kernel ends the
    worker when the *thread* that started it ends."""

    def __init__(self, worker_id: str, model: ModelSource, config: Config, listener: WorkerListener) -> None:
        self.worker_id = worker_id
        self.num_dropped = 0
        self._model = model
        self._config = config
        self._listener = listener
        self._link: WorkerLink | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._incarnation = ""
        self._is_ready = False
        self._failure = ""
        self._has_served = False
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._supervise())

    def send(self, message: ToWorker) -> None:
        """To the process that is there now; lost when there is none (the gate is told of that)."""
        if self._link is not None:
            self._link.send(message)

    async def stop(self) -> None:
        """Ask the worker to end, and end it when it does not. One that is loading would hear it too late."""
        self._stopping.set()
        self.send(Shutdown())
        if self._task is None:
            return
        if not self._is_ready and self._process is not None:
            self._process.kill()
        _, pending = await asyncio.wait([self._task], timeout=_STOP_TIMEOUT_S)
        if pending and self._process is not None:
            log.warning("worker %s does not end; killing it", self.worker_id)
            self._process.kill()
        await self._task

    async def _supervise(self) -> None:
        backoff_s = _FIRST_BACKOFF_S
        while not self._stopping.is_set():
            exit_code = await self._run_once()
            if self._stopping.is_set():
                return
            self._tell_end(exit_code)
            if not self._has_served:
                return
            backoff_s = _FIRST_BACKOFF_S if self._is_ready else min(2 * backoff_s, _MAX_BACKOFF_S)
            self._is_ready = False
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), backoff_s)

    def _tell_end(self, exit_code: int) -> None:
        how = f"killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"exit code {exit_code}"
        if self._is_ready:
            log.error("worker %s died (%s); starting it again", self.worker_id, how)
            self._listener.worker_lost(self.worker_id, f"worker {self.worker_id} died ({how})")
            return
        message = self._failure or f"the worker died while it loaded the model ({how})"
        if exit_code == -signal.SIGKILL and not self._failure:
            message += "; perhaps the machine is short of memory: try a smaller --kv-memory"
        self._listener.worker_failed(self.worker_id, message)

    async def _run_once(self) -> int:
        """From spawn to the end of the process. Returns its exit code."""
        self._incarnation = secrets.token_hex(8)
        self._failure = ""
        link = self._link = WorkerLink(self._on_message)
        exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        process = self._process = self._spawn(link.address)
        # A thread, since a child watcher would depend on the kind of event loop.
        threading.Thread(target=_wait, args=(process, exited), name=f"wait {self.worker_id}", daemon=True).start()
        try:
            return await exited
        finally:
            self.num_dropped += link.num_dropped
            link.close()
            self._link = None
            self._process = None
            if process.stdin is not None:
                process.stdin.close()

    def _spawn(self, address: str) -> subprocess.Popen[bytes]:
        spec = WorkerSpec(
            worker_id=self.worker_id,
            incarnation=self._incarnation,
            address=address,
            parent_pid=os.getpid(),
            config_json=self._config.model_dump_json(),
            model=self._model,
        )
        # Blocked signals stay blocked across exec: the worker cannot be ended before it has said that it ignores them.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "tidegate.worker.process", PROCESS_NAME, self.worker_id],
                stdin=subprocess.PIPE,
                stdout=2,  # a library that prints must not print into --json output
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died at once; its exit code says so
            process.stdin.write(spec.encode())
            process.stdin.flush()
        return process

    def _on_message(self, message: FromWorker) -> None:
        if message.incarnation != self._incarnation:
            self.num_dropped += 1
            return
        match message:
            case StepReport():
                self._listener.worker_report(self.worker_id, message)
            case Loading(_, text):
                self._listener.worker_loading(self.worker_id, text)
            case Ready(_, info):
                if (info.version, info.protocol_version) != (__version__, PROTOCOL_VERSION):
                    self._failure = (
                        f"the worker is of version {info.version}, this is {__version__}: restart the server"
                    )
                    self.send(Shutdown())
                    return
                self._is_ready = self._has_served = True
                self._listener.worker_ready(info)
            case StartFailed(_, text):
                self._failure = text
                self.send(Shutdown())


def _wait(process: subprocess.Popen[bytes], exited: asyncio.Future[int]) -> None:
    exit_code = process.wait()
    with contextlib.suppress(RuntimeError):  # the event loop has been closed; nobody waits any more
        exited.get_loop().call_soon_threadsafe(_set_exit_code, exited, exit_code)


def _set_exit_code(exited: asyncio.Future[int], exit_code: int) -> None:
    if not exited.done():
        exited.set_result(exit_code)
