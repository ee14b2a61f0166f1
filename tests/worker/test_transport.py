"""The wire: real sockets, hostile frames, and nothing left in the file system."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine_driver import make_request
from tidegate.worker import transport as wire
from tidegate.worker.messages import Cancel, FromWorker, Loading, Shutdown, StartFailed, Submit, ToWorker
from tidegate.worker.transport import PairTransport, TransportError, WorkerLink

GARBAGE = [
    b"",
    b"\x00",
    b"\xc1" * 100,
    msgspec.msgpack.encode({"type": "Unknown"}),
    msgspec.msgpack.encode({"type": "Submit", "request": {"request_id": 7}}),
    msgspec.msgpack.encode({"type": "Cancel"}),
    b"\x91" * 100_000,  # nested deeper than any stack
    msgspec.msgpack.encode(Submit(make_request("a", [1], 1)))[:-3],
]


class Pair:
    """Both ends in one process; the worker's end is driven from a thread, as it blocks."""

    def __init__(self) -> None:
        self.received: list[FromWorker] = []
        self.arrived = asyncio.Event()
        self.link = WorkerLink(self._on_message)
        self.folder = Path(self.link.address.removeprefix("ipc://")).parent
        self.worker: PairTransport

    def _on_message(self, message: FromWorker) -> None:
        self.received.append(message)
        self.arrived.set()

    async def at_worker(self, num_messages: int) -> list[ToWorker]:
        messages: list[ToWorker] = []
        while len(messages) < num_messages:
            messages += await asyncio.to_thread(self.worker.receive, 10.0)
        return messages

    async def at_frontend(self, num_messages: int) -> list[FromWorker]:
        while len(self.received) < num_messages:
            self.arrived.clear()
            await asyncio.wait_for(self.arrived.wait(), 10.0)
        return self.received


@asynccontextmanager
async def pair() -> AsyncIterator[Pair]:
    one = Pair()
    try:
        one.worker = await asyncio.to_thread(PairTransport, one.link.address)
        yield one
    finally:
        one.worker.close()
        one.link.close()


def test_messages_arrive_whole_and_in_order_both_ways() -> None:
    async def scenario() -> None:
        async with pair() as one:
            request = make_request("a", list(range(1000)), 8)
            for message in (Submit(request), Cancel("a"), Shutdown()):
                one.link.send(message)
            assert await one.at_worker(3) == [Submit(request), Cancel("a"), Shutdown()]
            for number in range(600):  # more than the link takes in at once
                one.worker.send(Loading("i", str(number)))
            messages = await one.at_frontend(600)
            assert messages == [Loading("i", str(number)) for number in range(600)]

    asyncio.run(scenario())


def test_the_socket_file_is_private_and_gone_once_the_worker_has_connected() -> None:
    async def scenario() -> None:
        link = WorkerLink(lambda message: None)
        folder = Path(link.address.removeprefix("ipc://")).parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert (folder / "socket").exists()
        worker = await asyncio.to_thread(PairTransport, link.address)
        assert not folder.exists()
        worker.close()
        link.close()

    asyncio.run(scenario())


def test_a_link_that_nobody_connected_to_leaves_no_file() -> None:
    async def scenario() -> None:
        link = WorkerLink(lambda message: None)
        link.send(Cancel("a"))
        link.close()
        link.close()
        link.send(Cancel("a"))
        assert not Path(link.address.removeprefix("ipc://")).parent.exists()

    asyncio.run(scenario())


def test_a_worker_without_a_frontend_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(wire, "_CONNECT_TIMEOUT_S", 0.05)
    monkeypatch.setattr(wire, "_LINGER_MS", 0)
    with pytest.raises(TransportError, match="no frontend"):
        PairTransport(f"ipc://{tmp_path / 'x' / 'socket'}")


def test_what_does_not_decode_is_counted_and_left_out_at_the_worker() -> None:
    async def scenario() -> None:
        async with pair() as one:
            for frame in GARBAGE:
                one.link._socket.send(frame)
            one.link.send(Cancel("after"))
            assert await one.at_worker(1) == [Cancel("after")]
            assert one.worker.num_dropped == len(GARBAGE)

    asyncio.run(scenario())


def test_what_does_not_decode_is_counted_and_left_out_at_the_frontend() -> None:
    async def scenario() -> None:
        async with pair() as one:
            for frame in GARBAGE:
                one.worker._socket.send(frame)
            one.worker.send(StartFailed("i", "after"))
            assert await one.at_frontend(1) == [StartFailed("i", "after")]
            assert one.link.num_dropped == len(GARBAGE)

    asyncio.run(scenario())


def test_a_frame_above_the_limit_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_MESSAGE_BYTES", 1000)

    async def scenario() -> None:
        async with pair() as one:
            one.link.send(Cancel("x" * 1001))
            one.link.send(Cancel("x"))
            assert await one.at_worker(1) == [Cancel("x")]
            assert one.worker.num_dropped == 1

    asyncio.run(scenario())


@given(st.binary(max_size=200), st.integers(0, 199), st.integers(0, 255))
def test_no_bytes_raise_anything_but_what_is_caught(noise: bytes, place: int, value: int) -> None:
    """Random bytes, and real messages with a byte changed or cut, for both directions."""
    real = msgspec.msgpack.encode(Submit(make_request("abc", [1, 2, 3], 5)))
    changed = bytearray(real)
    changed[place % len(real)] = value
    decoders: tuple[Callable[[bytes], object], ...] = (wire._to_worker.decode, wire._from_worker.decode)
    for decode in decoders:
        for frame in (noise, bytes(changed), real[: place % len(real)]):
            with suppress(msgspec.MsgspecError, ValueError, RecursionError):
                decode(frame)
