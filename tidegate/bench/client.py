"""One streamed request to an OpenAI-compatible server, over a bare connection, timed at the socket read.

    connect -> request -> status, headers -> SSE events ... -> [DONE] | hung up | broken off | refused

Owns: HTTP/1.1 as far as a load generator needs it, and the reading of completion chunks. It is kept light because it
often shares its cores with the server it measures: one protocol object a request, no HTTP library, no tasks per event.
Never does: schedule, retry or judge.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import msgspec

from tidegate.config import ConfigError

_MAX_ERROR_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server under test."""

    name: str
    host: str
    port: int
    prefix: str = ""
    is_https: bool = False
    api_key: str | None = None

    @classmethod
    def parse(cls, text: str, api_key: str | None = None) -> Endpoint:
        """From NAME=URL or URL; /v1 at its end may be left out. Raises ConfigError."""
        name, separator, url = text.partition("=")
        if not separator or "://" in name:
            name, url = "", text
        parts = urlsplit(url)
        try:
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            port = 0
        if parts.scheme not in ("http", "https") or not parts.hostname or not port:
            raise ConfigError(f"{url} is not an address; write it like http://127.0.0.1:8000")
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(name or parts.netloc, parts.hostname, port, prefix, parts.scheme == "https", api_key)

    def head(self, method: str, path: str, length: int, headers: dict[str, str] | None = None) -> bytes:
        lines = [
            f"{method} {self.prefix}{path} HTTP/1.1",
            f"Host: {self.host}:{self.port}",
            "Connection: close",
            "Accept: text/event-stream, application/json",
        ]
        if length:
            lines += ["Content-Type: application/json", f"Content-Length: {length}"]
        if self.api_key is not None and "Authorization" not in (headers or {}):
            lines.append(f"Authorization: Bearer {self.api_key}")
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        return ("\r\n".join(lines) + "\r\n\r\n").encode()


@dataclass(slots=True)
class CallRecord:
    """What one call brought. Times are of time.monotonic(). `status` 0: no answer at all.

    `event_times` holds the time of each event that carried output; an event is nearly always one token.
    `num_output_tokens` is the server's own count where it told, else the number of events.
    """

    connect_s: float
    sent_s: float = 0.0
    answered_s: float = 0.0
    ended_s: float = 0.0
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    event_times: array[float] = field(default_factory=lambda: array("d"))
    num_output_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    finish_reason: str = ""
    service_tier: str = ""
    is_complete: bool = False
    has_hung_up: bool = False
    error: str = ""
    text: str = ""
    body: bytes = b""


class _Text(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    role: str | None = None


class _ChoiceChunk(msgspec.Struct):
    text: str | None = None
    delta: _Text | None = None
    finish_reason: str | None = None


class _CachedDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _CachedDetails | None = None


class _Chunk(msgspec.Struct):
    choices: list[_ChoiceChunk] = []
    usage: _Usage | None = None
    error: Any = None
    service_tier: str | None = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


async def call(
    endpoint: Endpoint,
    request: bytes,
    *,
    hang_up_after: int | None = None,
    keep_text: bool = False,
    timeout_s: float | None = None,
    on_first_event: Callable[[], None] | None = None,
) -> CallRecord:
    """Send the bytes of a whole request. Never raises for what the server or the network does: the record says it.

    `hang_up_after`: close the connection once that many output events have come.
    """
    record = CallRecord(time.monotonic())
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    stream = _Stream(record, request, done, hang_up_after, keep_text, on_first_event)
    try:
        async with asyncio.timeout(timeout_s):
            await _connect(endpoint, stream)
            await done
    except TimeoutError:
        record.error = record.error or f"no end within {timeout_s:g} s"
    except OSError as error:
        record.error = record.error or f"cannot connect: {error.strerror or type(error).__name__}"
    finally:
        stream.close()
        record.ended_s = record.ended_s or time.monotonic()
    return record


async def _connect(endpoint: Endpoint, stream: _Stream) -> None:
    await asyncio.get_running_loop().create_connection(
        lambda: stream,
        endpoint.host,
        endpoint.port,
        ssl=ssl.create_default_context() if endpoint.is_https else None,
    )


class _Stream(asyncio.Protocol):
    def __init__(
        self,
        record: CallRecord,
        request: bytes,
        done: asyncio.Future[None],
        hang_up_after: int | None,
        keep_text: bool,
        on_first_event: Callable[[], None] | None,
    ) -> None:
        self._record = record
        self._request = request
        self._done = done
        self._hang_up_after = hang_up_after
        self._keep_text = keep_text
        self._on_first_event = on_first_event
        self._transport: asyncio.Transport | None = None
        self._head: bytes | None = b""  # until it is complete
        self._chunks: _ChunkDecoder | None = None
        self._events = b""
        self._is_stream = False
        self._left: int | None = None

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # asyncio's side.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name
        self._transport = transport
        raw = transport.get_extra_info("socket")
        if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._record.sent_s = time.monotonic()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        if self._done.done():
            return
        try:
            if self._head is not None:
                self._head += data
                head, separator, data = self._head.partition(b"\r\n\r\n")
                if not separator:
                    return
                self._head = None
                self._take_head(head, now)
            self._take_body(data, now)
        except (ValueError, msgspec.MsgspecError) as error:
            self._end(now, f"not an answer that can be read: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        is_whole = self._record.is_complete or (self._head is None and not self._is_stream and not self._left)
        self._end(time.monotonic(), "" if is_whole else "the connection broke off")

    # HTTP.

    def _take_head(self, head: bytes, now: float) -> None:
        status_line, _, lines = head.decode("latin-1").partition("\r\n")
        record = self._record
        version, _, rest = status_line.partition(" ")
        if not version.startswith("HTTP/"):
            raise ValueError(f"{status_line[:80]!r} is no status line")
        record.status = int(rest[:3])
        record.answered_s = now
        for line in lines.split("\r\n"):
            name, _, value = line.partition(":")
            record.headers[name.strip().lower()] = value.strip()
        self._is_stream = record.headers.get("content-type", "").startswith("text/event-stream")
        if "chunked" in record.headers.get("transfer-encoding", ""):
            self._chunks = _ChunkDecoder()
        elif "content-length" in record.headers:
            self._left = int(record.headers["content-length"])

    def _take_body(self, data: bytes, now: float) -> None:
        is_over = False
        if self._chunks is not None:
            data, is_over = self._chunks.feed(data)
        elif self._left is not None:
            self._left -= len(data)
            is_over = self._left <= 0
        if self._is_stream:
            self._take_events(data, now)
        elif len(self._record.body) < _MAX_ERROR_BYTES:
            self._record.body += data
        if is_over:
            is_cut = self._is_stream and not self._record.is_complete
            self._end(now, "the stream ended without [DONE]" if is_cut else "")

    # Server-sent events.

    def _take_events(self, data: bytes, now: float) -> None:
        *events, self._events = (self._events + data).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            for line in event.split(b"\n"):
                if line.startswith(b"data:"):
                    self._take_event(line[5:].strip(), now)
            if self._done.done():
                return

    def _take_event(self, data: bytes, now: float) -> None:
        record = self._record
        if data == b"[DONE]":
            record.is_complete = True
            self._end(now, "")
            return
        chunk = _decode_chunk(data)
        if chunk.error is not None:
            self._end(now, str(chunk.error.get("message", "") if isinstance(chunk.error, dict) else chunk.error))
            return
        if chunk.service_tier is not None:
            record.service_tier = chunk.service_tier
        if chunk.usage is not None:
            record.num_prompt_tokens = chunk.usage.prompt_tokens
            record.num_output_tokens = chunk.usage.completion_tokens
            details = chunk.usage.prompt_tokens_details
            record.num_cached_tokens = (details.cached_tokens or 0) if details is not None else 0
        for choice in chunk.choices:
            if choice.finish_reason is not None:
                record.finish_reason = choice.finish_reason
            text = _output_text(choice)
            if text is not None:
                self._take_output(text, now)

    def _take_output(self, text: str, now: float) -> None:
        record = self._record
        record.event_times.append(now)
        if self._keep_text:
            record.text += text
        num_events = len(record.event_times)
        if num_events == 1 and self._on_first_event is not None:
            self._on_first_event()
        if num_events == self._hang_up_after:
            record.has_hung_up = True
            self._end(now, "")

    def _end(self, now: float, error: str) -> None:
        if self._done.done():
            return
        record = self._record
        record.ended_s = now
        record.error = record.error or error
        record.num_output_tokens = record.num_output_tokens or len(record.event_times)
        self._done.set_result(None)
        self.close()


def _output_text(choice: _ChoiceChunk) -> str | None:
    """The text of a chunk that stands for output, or None. An opening chunk with a role and one that only ends do not;
    an empty text in between does: some servers send one for a token that shows nothing yet."""
    if choice.delta is not None:
        text = choice.delta.content if choice.delta.content is not None else choice.delta.reasoning_content
        is_opening = choice.delta.role is not None
    else:
        text, is_opening = choice.text, False
    if not text and (is_opening or choice.finish_reason is not None):
        return None
    return text


class _ChunkDecoder:
    """Chunked transfer coding, fed piece by piece."""

    def __init__(self) -> None:
        self._buffer = b""
        self._left = 0  # of the current chunk, its closing line break included

    def feed(self, data: bytes) -> tuple[bytes, bool]:
        """The content that is complete, and whether the last chunk has come. Raises ValueError for what is no chunk."""
        buffer = self._buffer + data
        parts = []
        place = 0
        while True:
            if self._left:
                piece = buffer[place : place + self._left]
                content_left = self._left - 2
                if content_left > 0:
                    parts.append(piece[:content_left])
                place += len(piece)
                self._left -= len(piece)
                if self._left:
                    break
            end = buffer.find(b"\r\n", place)
            if end < 0:
                break
            size = int(buffer[place:end].partition(b";")[0], 16)
            place = end + 2
            if size == 0:
                return b"".join(parts), True
            self._left = size + 2
        self._buffer = buffer[place:]
        return b"".join(parts), False
