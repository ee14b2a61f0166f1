"""The wire between the frontend and one worker process: a private zmq pair over ipc, msgspec messages.

    frontend: WorkerLink (binds, on the event loop)  ══ ipc://<folder, 0700>/socket ══  worker: PairTransport (blocks)

Owns: sockets, encoding, and the folder of the socket file. The file is only needed until the worker has connected; the
worker then removes it, so that no way to die afterwards leaves anything behind. Each process has a link of its own: a
message can come from no other process, and nothing of a dead worker can reach its successor.
Never does: trust a frame. One that is too large or does not decode is counted in `num_dropped` and left out.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec
import zmq

from tidegate.worker.messages import FromWorker, ToWorker

MAX_MESSAGE_BYTES = 64 * 2**20
_CONNECT_TIMEOUT_S = 20.0
_LINGER_MS = 2000  # for the last words of a worker that could not start
_MAX_BATCH = 256  # frames taken in at once, so that a flood on one link does not hold up the event loop

_to_worker = msgspec.msgpack.Decoder(ToWorker)
_from_worker = msgspec.msgpack.Decoder(FromWorker)


class TransportError(RuntimeError):
    """The other end cannot be reached."""


class Transport(Protocol):
    """What the engine loop talks to: the wire in a worker, two lists in offline use."""

    def receive(self, timeout_s: float) -> list[ToWorker]:
        """All messages that are there; waits up to `timeout_s` for the first one."""
        ...

    def send(self, message: FromWorker) -> None: ...


class PairTransport:
    """The worker's end."""

    def __init__(self, address: str) -> None:
        """Connects, then removes the folder of the socket file. Raises TransportError when nobody listens."""
        self.num_dropped = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        # The gate bounds what is dispatched; a limit here would only turn into lost or blocked messages.
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # writable means connected
        self._socket.connect(address)
        if not self._socket.poll(int(_CONNECT_TIMEOUT_S * 1000), zmq.POLLOUT):
            self.close()
            raise TransportError(f"no frontend at {address}")
        remove_socket_folder(address)

    def receive(self, timeout_s: float) -> list[ToWorker]:
        messages: list[ToWorker] = []
        if timeout_s > 0.0 and not self._socket.poll(int(timeout_s * 1000) + 1):
            return messages
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            try:
                messages.append(_to_worker.decode(_checked(frame)))
            except (msgspec.MsgspecError, ValueError, RecursionError):
                self.num_dropped += 1

    def send(self, message: FromWorker) -> None:
        """Blocks when a thousand messages are on their way: a frontend that is stuck stops its worker too."""
        self._socket.send(self._encoder.encode(message))

    def close(self) -> None:
        self._socket.close()
        self._context.term()


class WorkerLink:
    """The frontend's end. All calls are made on one event loop; `on_message` is called there, once a message."""

    def __init__(self, on_message: Callable[[FromWorker], None]) -> None:
        self.num_dropped = 0
        self.address = f"ipc://{Path(tempfile.mkdtemp(prefix='tidegate-')) / 'socket'}"
        self._on_message = on_message
        self._encoder = msgspec.msgpack.Encoder()
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.bind(self.address)
        self._loop = asyncio.get_running_loop()
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._on_readable)

    def send(self, message: ToWorker) -> None:
        """Never blocks. What is sent to a worker that has died is lost, and the gate is told of the death."""
        if self._socket.closed:
            return
        try:
            self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:  # nobody is connected (yet, or any more)
            return
        # zmq's descriptor signals changes only, and sending may have consumed one.
        self._loop.call_soon(self._on_readable)

    def _on_readable(self) -> None:
        for _ in range(_MAX_BATCH):
            if self._socket.closed:
                return
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = _from_worker.decode(_checked(frame))
            except (msgspec.MsgspecError, ValueError, RecursionError):
                self.num_dropped += 1
                continue
            self._on_message(message)
        self._loop.call_soon(self._on_readable)

    def close(self) -> None:
        """Idempotent. Whatever has not been taken in is lost."""
        if self._socket.closed:
            return
        self._loop.remove_reader(self._fd)
        self._socket.close()
        self._context.term()
        remove_socket_folder(self.address)


def remove_socket_folder(address: str) -> None:
    """Remove the private folder of an address made by WorkerLink. Idempotent."""
    shutil.rmtree(Path(address.removeprefix("ipc://")).parent, ignore_errors=True)


def _checked(frame: bytes) -> bytes:
    if len(frame) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(frame)} bytes")
    return frame
