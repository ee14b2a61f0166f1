"""A worker process: `python -m tidegate.worker.process tidegate-worker ID`, with a WorkerSpec on standard input.

    read the spec -> connect -> Loading ... -> Ready -> engine loop -> Shutdown
                                           └-> StartFailed (its one line) -> Shutdown

Owns: its own end. It ignores SIGTERM and SIGINT (a Ctrl-C reaches the whole process group; who drains is the frontend)
and follows the frontend instead: Shutdown, the end of the inherited pipe, or the kernel's parent-death signal end it,
so that a frontend killed with -9 leaves neither a process nor a file. Logs go to stderr, with the worker's id.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading

from tidegate.clock import RealClock
from tidegate.config import ConfigError
from tidegate.worker.build import build_engine, build_executor, initial_step_cost
from tidegate.worker.loop import EngineLoop, settle_garbage_collection
from tidegate.worker.messages import Loading, Ready, Shutdown, StartFailed, WorkerInfo
from tidegate.worker.spec import WorkerSpec
from tidegate.worker.transport import PairTransport, TransportError, remove_socket_folder

PROCESS_NAME = "tidegate-worker"
FOLLOWED_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_STDIN = 0
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_ORPHAN_EXIT_CODE = 3
_LAST_WORDS_S = 10.0

log = logging.getLogger("tidegate.worker")


def main() -> int:
    # The frontend blocked these before it forked, so that not even the first instant is open to them.
    for number in FOLLOWED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FOLLOWED_SIGNALS)
    spec = WorkerSpec.decode(_read_line(_STDIN))
    config = spec.config
    logging.basicConfig(
        level=config.log.log_level.upper(),
        format=f"%(asctime)s %(levelname)s worker {spec.worker_id}: %(message)s",
        stream=sys.stderr,
    )
    threading.Thread(target=_end_with_frontend, args=(spec,), name="frontend watch", daemon=True).start()
    try:
        transport = PairTransport(spec.address)
    except TransportError as error:
        log.error("%s", error)
        return _ORPHAN_EXIT_CODE
    _die_with_parent(spec.parent_pid)
    try:
        return _serve(spec, transport)
    finally:
        transport.close()


def _serve(spec: WorkerSpec, transport: PairTransport) -> int:
    config = spec.config
    transport.send(Loading(spec.incarnation, f"loading {spec.model.name}"))
    try:
        executor = build_executor(spec.model, config)
        step_cost = initial_step_cost(executor, config)
        engine = build_engine(executor, config, step_cost)
    except ConfigError as error:
        return _start_failed(spec, transport, str(error))
    except Exception as error:  # whatever it is, the operator gets a line and the log the rest
        log.exception("the worker could not start")
        return _start_failed(spec, transport, f"the worker could not start: {type(error).__name__}: {error}")
    settle_garbage_collection()
    loop = EngineLoop(engine, executor, transport, RealClock(), incarnation=spec.incarnation)
    info = WorkerInfo.of(
        engine.info,
        spec.config.scheduler,
        worker_id=spec.worker_id,
        incarnation=spec.incarnation,
        pid=os.getpid(),
        step_cost=step_cost,
    )
    transport.send(Ready(spec.incarnation, info))
    log.debug("ready: %d blocks of %d tokens, %s", engine.info.num_blocks, engine.info.block_size, step_cost)
    loop.run()
    executor.close()
    if transport.num_dropped:
        log.warning("%d malformed messages were dropped", transport.num_dropped)
    return 0


def _start_failed(spec: WorkerSpec, transport: PairTransport, message: str) -> int:
    """Waits for the frontend's answer, so that the message has arrived before the process is seen to end."""
    transport.send(StartFailed(spec.incarnation, " ".join(message.split())))
    clock = RealClock()
    deadline_s = clock.now() + _LAST_WORDS_S
    while (left_s := deadline_s - clock.now()) > 0.0:
        if any(isinstance(message, Shutdown) for message in transport.receive(left_s)):
            break
    return 2


def _read_line(fd: int) -> bytes:
    """One line, and nothing after it. Unbuffered: a buffer's lock would be held by the watching thread for ever."""
    line = b""
    while not line.endswith(b"\n"):
        chunk = os.read(fd, 65536)
        if not chunk:
            sys.exit(_ORPHAN_EXIT_CODE)
        line += chunk
    return line


def _end_with_frontend(spec: WorkerSpec) -> None:
    """Nothing more is ever written to standard input; its end means that the frontend is gone, however it went."""
    while os.read(_STDIN, 1):
        pass
    remove_socket_folder(spec.address)
    os._exit(_ORPHAN_EXIT_CODE)


def _die_with_parent(parent_pid: int) -> None:
    """The kernel's own watch, for when no Python thread gets to run. Only now: the socket file is gone already."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_PR_SET_NAME, PROCESS_NAME.encode(), 0, 0, 0)
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the line above
        os._exit(_ORPHAN_EXIT_CODE)


if __name__ == "__main__":
    sys.exit(main())
