"""The HTTP server: a bound socket, uvicorn on it, and a drain that lets running requests finish.

Owns: the listening socket, the event loop's signals, and the order of stopping:

    SIGTERM / SIGINT ──> draining: still listening, health and new requests get 503, running requests go on
                    ──> when none runs, or drain_timeout has passed: connections closed, serve() returns

A repeated signal changes nothing. Never does: start or stop what is behind the api; the caller does, around serve().
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import uvicorn
import uvloop

from tidegate.api.app import Api
from tidegate.api.connection import protocol_class
from tidegate.config import ConfigError, ServerConfig

logger = logging.getLogger("tidegate.api")

Result = TypeVar("Result")

KEEP_ALIVE_S = 75
"""Idle time of a connection; longer than clients keep theirs, so that they, not we, close first."""
SEND_BUFFER_BYTES = 64 * 2**10
"""The kernel's buffer a connection, small, so that a client that stops reading is noticed and costs little."""
_BACKLOG = 2048
_DRAIN_POLL_S = 0.05
_CLOSE_TIMEOUT_S = 2


def bind(config: ServerConfig) -> socket.socket:
    """The listening socket. Raises ConfigError when the address cannot be used."""
    where = f"{config.host}:{config.port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(f"cannot listen on {where}: {error.strerror or error}; check --host") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {where}: {(error.strerror or str(error)).lower()}; free it or choose another --port"
        ) from None
    listener.setblocking(False)
    return listener


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """Run the frontend's coroutine on the event loop that the server is made for."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


class Server:
    """Serves one Api on one socket. `serve` returns when a drain, by signal or begin_drain, is over."""

    def __init__(self, api: Api, config: ServerConfig, listener: socket.socket) -> None:
        self._api = api
        self._config = config
        self._listener = listener
        self._drain = asyncio.Event()
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                api.app,
                http=protocol_class(config),
                ws="none",
                lifespan="off",
                interface="asgi3",
                access_log=False,
                log_config=None,
                log_level="warning",
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=_CLOSE_TIMEOUT_S,
                backlog=_BACKLOG,
            )
        )

    @property
    def url(self) -> str:
        host, port = self._listener.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def begin_drain(self) -> None:
        """Take no new requests. On the event loop; again is without effect."""
        if not self._api.is_draining:
            self._api.is_draining = True
            logger.info(
                "draining: %d requests get up to %g s to finish", self._api.num_running, self._config.drain_timeout
            )
        self._drain.set()

    async def serve(
        self,
        *,
        on_started: Callable[[], None] | None = None,
        on_hangup: Callable[[], None] | None = None,
        handles_signals: bool = True,
    ) -> None:
        """`on_started` is called when connections are accepted, `on_hangup` at each SIGHUP."""
        raise_file_limit(self._config.max_connections)
        with self._signals(on_hangup) if handles_signals else contextlib.nullcontext():
            serving = asyncio.ensure_future(self._uvicorn.serve(sockets=[self._listener]))
            draining = asyncio.ensure_future(self._drained())
            if on_started is not None:
                asyncio.get_running_loop().call_soon(on_started)
            try:
                await asyncio.wait([serving, draining], return_when=asyncio.FIRST_COMPLETED)
                self._uvicorn.should_exit = True
                await serving
            finally:
                draining.cancel()
                self._api.close()

    async def _drained(self) -> None:
        await self._drain.wait()
        deadline_s = self._api.now() + self._config.drain_timeout
        while self._api.num_running and self._api.now() < deadline_s:
            await asyncio.sleep(_DRAIN_POLL_S)
        if self._api.num_running:
            logger.warning("drain timeout: %d requests are cut off", self._api.num_running)
            self._api.cut_off()
            await asyncio.sleep(_DRAIN_POLL_S)

    @contextlib.contextmanager
    def _signals(self, on_hangup: Callable[[], None] | None) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        handlers = {signal.SIGTERM: self.begin_drain, signal.SIGINT: self.begin_drain}
        if on_hangup is not None:
            handlers[signal.SIGHUP] = on_hangup
        for one, handler in handlers.items():
            loop.add_signal_handler(one, handler)
        try:
            yield
        finally:
            for one in handlers:
                loop.remove_signal_handler(one)


class _Uvicorn(uvicorn.Server):
    """Without uvicorn's own signal handling."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def raise_file_limit(num_connections: int) -> None:
    """A connection is a file: lift the soft limit as far as needed and allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_connections + 256
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
