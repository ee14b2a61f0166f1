"""A client that goes away frees everything, in whatever phase its request is."""

from __future__ import annotations

import socket
import threading

import pytest

from tests.http.fake_service import WAIT_S, FakeService, RunningServer
from tests.http.raw import chat, connect, post, read_until
from tidegate.api.service import Outcome
from tidegate.request import FinishReason


def reset(sock: socket.socket) -> None:
    """Close with a reset instead of an orderly end."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    sock.close()


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("end", [socket.socket.close, reset, lambda sock: sock.shutdown(socket.SHUT_WR)])
def test_before_the_first_token(server: RunningServer, service: FakeService, streams: bool, end: object) -> None:
    service.reply = None
    sock = connect(server)
    sock.sendall(chat(stream=streams))
    running = service.next_stream()
    end(sock)  # type: ignore[operator]
    assert running.is_closed.wait(WAIT_S)
    assert service.wait_outcome(running.request.request_id) is Outcome.CANCELLED
    sock.close()


@pytest.mark.parametrize("end", [socket.socket.close, reset])
def test_in_mid_stream(server: RunningServer, service: FakeService, end: object) -> None:
    service.reply = None
    service.on_submit = lambda stream: stream.emit("first")
    sock = connect(server)
    sock.sendall(chat(stream=True))
    read_until(sock, b"first")
    running = service.next_stream()
    end(sock)  # type: ignore[operator]
    assert running.is_closed.wait(WAIT_S)
    assert service.wait_outcome(running.request.request_id) is Outcome.CANCELLED


def test_in_the_middle_of_a_whole_answer(server: RunningServer, service: FakeService) -> None:
    service.reply = None
    service.on_submit = lambda stream: stream.emit("first")
    with connect(server) as sock:
        sock.sendall(chat())
        running = service.next_stream()
    assert running.is_closed.wait(WAIT_S)
    assert service.wait_outcome(running.request.request_id) is Outcome.CANCELLED


def test_with_several_prompts(server: RunningServer, service: FakeService) -> None:
    service.reply = None
    with connect(server) as sock:
        sock.sendall(post("/v1/completions", b'{"prompt": ["a", "b"]}'))
        running = [service.next_stream(), service.next_stream()]
    assert all(stream.is_closed.wait(WAIT_S) for stream in running)
    assert service.wait_outcomes(2) == [Outcome.CANCELLED] * 2


def test_within_the_body(server: RunningServer, service: FakeService) -> None:
    with connect(server) as sock:
        sock.sendall(chat()[:-10])
    assert service.wait_outcomes(1) == [Outcome.CANCELLED]
    assert not service.requests


def test_while_the_prompt_is_tokenized(
    server: RunningServer, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert service.served is not None
    is_encoding, may_end = threading.Event(), threading.Event()

    def encode(*_: object, **__: object) -> list[int]:
        is_encoding.set()
        assert may_end.wait(WAIT_S)
        return [65]

    monkeypatch.setattr(service.served.tokenizer, "encode", encode)
    with connect(server) as sock:
        sock.sendall(post("/v1/completions", b'{"prompt": "%s"}' % (b"a" * 5000)))
        assert is_encoding.wait(WAIT_S)
    with connect(server) as other:  # answered after the hang-up has been read
        other.sendall(b"GET /health/live HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n")
        read_until(other, b"live")
    may_end.set()
    assert service.wait_outcomes(1) == [Outcome.CANCELLED]
    assert not service.requests


def test_behind_pipelined_requests(server: RunningServer, service: FakeService) -> None:
    service.reply = None
    with connect(server) as sock:
        sock.sendall(chat() + chat() + chat())
        running = service.next_stream()
    assert running.is_closed.wait(WAIT_S)
    assert service.wait_outcome(running.request.request_id) is Outcome.CANCELLED
    assert len(service.requests) == 1


def test_behind_a_request_that_is_pipelined_later(server: RunningServer, service: FakeService) -> None:
    service.reply = None
    service.on_submit = lambda stream: stream.emit("first")
    with connect(server) as sock:
        sock.sendall(chat(stream=True))
        read_until(sock, b"first")
        sock.sendall(chat())
        running = service.next_stream()
        running.emit("second")
        read_until(sock, b"second")
    assert running.is_closed.wait(WAIT_S)
    assert service.wait_outcome(running.request.request_id) is Outcome.CANCELLED


def test_hang_up_leaves_neighbours_alone(server: RunningServer, service: FakeService) -> None:
    service.reply = None
    service.on_submit = lambda stream: stream.emit("first")
    with connect(server) as stays:
        stays.sendall(chat(stream=True))
        neighbour = service.next_stream()
        read_until(stays, b"first")
        with connect(server) as leaves:
            leaves.sendall(chat(stream=True))
            running = service.next_stream()
        assert running.is_closed.wait(WAIT_S)
        assert not neighbour.is_closed.is_set()
        neighbour.emit("last", FinishReason.STOP)
        assert b"last" in read_until(stays, b"[DONE]")
    assert service.wait_outcome(neighbour.request.request_id) is Outcome.STOP
