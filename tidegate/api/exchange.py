"""Exchange: one HTTP request and its response, on raw ASGI.

Owns: reading the body within its limits, noticing at any time that the client has gone, and sending bytes.
Never does: anything about models. One task per request watches the client; nothing is started per token.
Invariant: at most one response is started, and after `is_gone` nothing is sent.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import msgspec
from starlette.types import Message, Receive, Scope, Send

from tidegate.api.errors import Outcome, Refused
from tidegate.tenancy.tenants import ANONYMOUS

CONNECTION_EXTENSION = "tidegate.connection"
_JSON_HEADER = (b"content-type", b"application/json")
_MAX_ECHO = 128


class Connection(Protocol):
    """What the server's transport tells of itself, in scope["extensions"][CONNECTION_EXTENSION]["connection"]."""

    @property
    def is_congested(self) -> bool:
        """Whether the client is behind: more is buffered for it than the limit."""
        ...

    @property
    def is_unread(self) -> bool:
        """Whether it was cut because the client did not read for too long."""
        ...

    def abort(self) -> None: ...


class Exchange:
    """`request_id` is ours and is the x-request-id of the response; a client's own id is echoed beside it."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, *, arrival_s: float, id_prefix: str) -> None:
        self.scope = scope
        self.arrival_s = arrival_s
        self.request_id = f"{id_prefix}-{secrets.token_hex(12)}"
        self.is_gone = False
        self.is_started = False
        self.is_cut_off = False
        self.on_end: Callable[[], None] | None = None
        """Called when the client goes away, or is cut off, before the response is complete."""
        self.extra_headers: list[tuple[bytes, bytes]] = []
        self.tenant = ANONYMOUS
        self.late_headers: Callable[[], Iterable[tuple[bytes, bytes]]] = tuple
        """What is told as it is when the response starts."""
        self._receive = receive
        self._send = send
        self._watcher: asyncio.Task[None] | None = None
        self._connection: Connection | None = (
            scope.get("extensions", {}).get(CONNECTION_EXTENSION, {}).get("connection")
        )
        self._request_headers: dict[bytes, bytes] = dict(scope["headers"])

    def header(self, name: bytes) -> bytes | None:
        return self._request_headers.get(name)

    @property
    def request_headers(self) -> dict[bytes, bytes]:
        return self._request_headers

    @property
    def client_address(self) -> str | None:
        client = self.scope.get("client")
        return None if client is None else str(client[0])

    @property
    def has_body(self) -> bool:
        return b"transfer-encoding" in self._request_headers or self.header(b"content-length") not in (None, b"0")

    async def read_body(self, *, max_size: int, timeout_s: float) -> bytes:
        """Raises Refused: BODY_TOO_LARGE (before reading when Content-Length says so), BODY_TIMEOUT, MEDIA_TYPE."""
        media_type = (self.header(b"content-type") or b"application/json").split(b";")[0].strip().lower()
        if media_type != b"application/json":
            raise self._unread(Refused(Outcome.MEDIA_TYPE, "the content-type must be application/json"))
        length = self.header(b"content-length")
        if length is not None and length.isdigit() and int(length) > max_size:
            raise self._unread(_too_large(max_size))
        chunks = []
        size = 0
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        self.is_gone = True
                        raise Refused(Outcome.CANCELLED, "the client went away while it sent the request")
                    chunk = message.get("body", b"")
                    size += len(chunk)
                    if size > max_size:
                        raise self._unread(_too_large(max_size))
                    chunks.append(chunk)
                    if not message.get("more_body", False):
                        return b"".join(chunks)
        except TimeoutError:
            raise self._unread(
                Refused(Outcome.BODY_TIMEOUT, f"the request did not arrive within {timeout_s:g} s")
            ) from None

    def _unread(self, refused: Refused) -> Refused:
        """The rest of the body stays unread, so the connection cannot be used again."""
        self.extra_headers.append((b"connection", b"close"))
        return refused

    def watch(self) -> None:
        """Notice from now on that the client goes away. After the body has been read."""
        self._watcher = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.is_gone = True
        if self.on_end is not None:
            self.on_end()

    def cut_off(self) -> None:
        """The server cannot go on with it."""
        self.is_cut_off = True
        if self.on_end is not None:
            self.on_end()

    async def abort(self) -> None:
        """Cut the connection; what is buffered for the client is dropped."""
        if self._connection is not None:
            self._connection.abort()
            if self._watcher is not None:
                await self._watcher

    def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None

    @property
    def is_congested(self) -> bool:
        return self._connection is not None and self._connection.is_congested

    def gone(self) -> Refused:
        """Why a client is gone that is."""
        if self._connection is not None and self._connection.is_unread:
            return Refused(Outcome.SLOW_READER, "the client does not read its answer")
        return Refused(Outcome.CANCELLED, "the client went away")

    async def start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self.is_started = True
        sent = [(b"x-request-id", self.request_id.encode()), *headers, *self.extra_headers, *self.late_headers()]
        client_id = self.header(b"x-request-id") or self.header(b"x-client-request-id")
        if client_id is not None:
            sent.append((b"x-client-request-id", _printable(client_id)))
        await self._send({"type": "http.response.start", "status": status, "headers": sent})

    async def write(self, data: bytes, *, more: bool) -> None:
        message: Message = {"type": "http.response.body", "body": data, "more_body": more}
        await self._send(message)

    async def respond(
        self,
        status: int,
        body: bytes,
        headers: Sequence[tuple[bytes, bytes]] = (),
        *,
        content_type: tuple[bytes, bytes] = _JSON_HEADER,
    ) -> None:
        """A whole response at once."""
        if self.is_gone:
            return
        await self.start(status, [content_type, (b"content-length", str(len(body)).encode()), *headers])
        await self.write(body, more=False)

    async def respond_json(self, document: Any, *, status: int = 200) -> None:
        await self.respond(status, msgspec.json.encode(document))

    async def refuse(self, refused: Refused) -> None:
        await self.respond(refused.status, refused.body(), refused.headers())


def _too_large(max_size: int) -> Refused:
    return Refused(Outcome.BODY_TOO_LARGE, f"the request body is larger than the {max_size} bytes that are accepted")


def _printable(value: bytes) -> bytes:
    return bytes(byte for byte in value[:_MAX_ECHO] if 0x20 <= byte < 0x7F)
