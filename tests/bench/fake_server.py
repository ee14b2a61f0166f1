"""A server that answers every request with bytes that the test chooses, cut wherever the test wants them cut."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tidegate.bench.client import Endpoint

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


@dataclass
class FakeServer:
    """`answers` are used in turn, the last one for ever. `requests` are what came in."""

    answers: list[Answer]
    requests: list[bytes] = field(default_factory=list)
    num_hang_ups: int = 0
    num_open: int = 0
    max_open: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_open += 1
        self.max_open = max(self.max_open, self.num_open)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            lines = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if line)
            body = await reader.readexactly(int(lines.get(b"content-length", b"0")))
            answer = self.answers[min(len(self.requests), len(self.answers) - 1)]
            self.requests.append(head + body)
            await answer(writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            self.num_hang_ups += 1
        finally:
            self.num_open -= 1
            writer.close()


@asynccontextmanager
async def fake_server(*answers: Answer) -> AsyncIterator[tuple[FakeServer, Endpoint]]:
    fake = FakeServer(list(answers))
    server = await asyncio.start_server(fake.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        yield fake, Endpoint.parse(f"fake=http://127.0.0.1:{port}")


def event(text: str) -> bytes:
    return b'data: {"choices":[{"index":0,"text":"%s","finish_reason":null}]}\n\n' % text.encode()


def completion_events(num_tokens: int, *, num_counted: int | None = None, cached: int = 0) -> list[bytes]:
    """A stream as our server sends it: tokens, the end, usage, [DONE]."""
    counted = num_tokens if num_counted is None else num_counted
    return [
        *(event(f"t{place} ") for place in range(num_tokens)),
        b'data: {"choices":[{"index":0,"text":"","finish_reason":"length"}]}\n\n',
        b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":%d,'
        b'"prompt_tokens_details":{"cached_tokens":%d}}}\n\n' % (counted, cached),
        b"data: [DONE]\n\n",
    ]


def stream_bytes(events: list[bytes]) -> bytes:
    """A whole chunked response, one chunk an event."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in events) + b"0\r\n\r\n"


def sends(data: bytes) -> Answer:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(data)

    return answer


def sends_in_pieces(data: bytes, size: int) -> Answer:
    async def answer(writer: asyncio.StreamWriter) -> None:
        for start in range(0, len(data), size):
            writer.write(data[start : start + size])
            await writer.drain()
            await asyncio.sleep(0)

    return answer


def refuses(status: str, body: bytes = b"{}", headers: bytes = b"") -> Answer:
    return sends(
        b"HTTP/1.1 %b\r\nContent-Type: application/json\r\n%bContent-Length: %d\r\n\r\n%b"
        % (status.encode(), headers, len(body), body)
    )
