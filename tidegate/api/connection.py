"""BoundedProtocol: uvicorn's HTTP/1.1 connection with the limits that it lacks.

Owns: time limits on clients that are slow to write (headers) or to read (responses), bounds on header bytes and on
pipelined requests, the number of connections, and error bodies in our own form. The time limit and the size limit of
a request's body are the exchange's.
Invariants: every connection that makes no progress is closed within a configured time; what one client can make us
buffer is bounded; a client that goes away is noticed by the request that is being answered, also behind pipelined ones.

    new ──first byte──> headers ──complete──> being answered ──> idle ──first byte──> headers ...
     └─ read_timeout ───────┘                 write_timeout       └─ keep-alive time
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

from uvicorn._types import ASGI3Application
from uvicorn.config import Config as UvicornConfig
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from tidegate.api.errors import Outcome, Refused
from tidegate.api.exchange import CONNECTION_EXTENSION
from tidegate.config import ServerConfig

WRITE_BUFFER_HIGH = 16 * 2**10
WRITE_BUFFER_LOW = 4 * 2**10
MAX_HEADER_BYTES = 64 * 2**10
MAX_PIPELINED = 8
MAX_PIPELINED_BODY_BYTES = 64 * 2**10
_NO_LINGER = struct.pack("ii", 1, 0)


def protocol_class(limits: ServerConfig) -> type[asyncio.Protocol]:
    """The protocol with these limits; uvicorn makes one instance a connection, and passes nothing of ours."""

    class Protocol(BoundedProtocol):
        def __init__(
            self,
            config: UvicornConfig,
            server_state: ServerState,
            app_state: dict[str, Any],
            _loop: asyncio.AbstractEventLoop | None = None,
        ) -> None:
            super().__init__(config, server_state, app_state, _loop, limits=limits)

    return Protocol


class BoundedProtocol(HttpToolsProtocol):
    """Also the `Connection` that exchanges see."""

    def __init__(
        self,
        config: UvicornConfig,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: ServerConfig,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = limits
        self._active: RequestResponseCycle | None = None
        self._read_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._num_unsent = 0
        self._is_unread = False
        self._num_header_bytes = 0
        self._is_in_headers = True

    # Connection

    @property
    def is_congested(self) -> bool:
        return self.flow.write_paused

    @property
    def is_unread(self) -> bool:
        return self._is_unread

    def abort(self) -> None:
        """With a reset: the kernel forgets at once what it still holds for a client that does not read."""
        sock = self.transport.get_extra_info("socket")
        if sock is not None and not self.transport.is_closing():
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self.transport.abort()

    # Reading

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=WRITE_BUFFER_HIGH, low=WRITE_BUFFER_LOW)
        if len(self.connections) > self._limits.max_connections:
            self._refuse(Refused(Outcome.TOO_MANY_CONNECTIONS, "too many connections are open"))
            return
        self._arm_read_timer()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._read_timer is None and (self._active is None or self._active.response_complete):
            self._arm_read_timer()
        super().data_received(data)
        if self._is_in_headers and not self.transport.is_closing():
            self._num_header_bytes += len(data)
            if self._num_header_bytes > MAX_HEADER_BYTES:
                self._refuse(Refused(Outcome.HEADERS_TOO_LARGE, f"headers exceed {MAX_HEADER_BYTES} bytes"))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_headers = True
        self._num_header_bytes = 0
        self.scope["extensions"] = {CONNECTION_EXTENSION: {"connection": self}}

    def on_headers_complete(self) -> None:
        self._is_in_headers = False
        self._num_header_bytes = 0
        self._disarm_read_timer()
        super().on_headers_complete()
        if self.pipeline:
            # uvicorn stops reading here, and would not notice any more that the client goes away.
            self.flow.resume_reading()
        if len(self.pipeline) > MAX_PIPELINED:
            self.abort()

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        if self.cycle is not self._active and len(self.cycle.body) > MAX_PIPELINED_BODY_BYTES:
            self.abort()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._active = cycle
        super()._start_asgi_task(cycle, app)

    def _arm_read_timer(self) -> None:
        self._disarm_read_timer()
        self._read_timer = self.loop.call_later(self._limits.read_timeout, self._read_timed_out)

    def _disarm_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _read_timed_out(self) -> None:
        self._read_timer = None
        if self._num_header_bytes and (self._active is None or self._active.response_complete):
            self._refuse(Refused(Outcome.BODY_TIMEOUT, "the request's headers did not arrive in time"))
        else:
            self.transport.close()

    # Writing

    def pause_writing(self) -> None:
        super().pause_writing()
        self._num_unsent = self.transport.get_write_buffer_size()
        self._arm_write_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._disarm_write_timer()

    def _arm_write_timer(self) -> None:
        self._disarm_write_timer()
        self._write_timer = self.loop.call_later(self._limits.write_timeout, self._write_timed_out)

    def _disarm_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _write_timed_out(self) -> None:
        """Nothing is written while the client is behind, so that an unchanged buffer is a client that does not read."""
        num_unsent = self.transport.get_write_buffer_size()
        if num_unsent >= self._num_unsent:
            self._is_unread = True
            self.abort()
            return
        self._num_unsent = num_unsent
        self._arm_write_timer()

    # Ending

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm_read_timer()
        self._disarm_write_timer()
        self.pipeline.clear()
        active = self._active
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        if active is not None and not active.response_complete:
            active.disconnected = True
            active.message_event.set()

    def shutdown(self) -> None:
        """The server stops: idle connections close now, the others after their response."""
        if self._active is None or self._active.response_complete:
            self.transport.close()
        else:
            self._active.keep_alive = False

    def send_400_response(self, msg: str) -> None:
        self._refuse(Refused(Outcome.INVALID_HTTP, "the request is not valid HTTP/1.1"))

    def _refuse(self, refused: Refused) -> None:
        """Answer outside any exchange, and close; with a response under way, only close."""
        if self._active is None or self._active.response_complete:
            body = refused.body()
            head = [
                f"HTTP/1.1 {refused.status} Refused\r\ncontent-type: application/json\r\n".encode(),
                f"content-length: {len(body)}\r\nconnection: close\r\n".encode(),
                *(name + b": " + value + b"\r\n" for name, value in refused.headers()),
            ]
            self.transport.write(b"".join([*head, b"\r\n", body]))
            self.transport.close()
        else:
            self.abort()
