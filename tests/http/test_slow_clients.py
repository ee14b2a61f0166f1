"""Clients that write slowly, do not read, or keep connections half open: closed by a limit, within bounded memory."""

from __future__ import annotations

import contextlib
import json
import select
import socket
from collections.abc import Iterator

import pytest

from tests.http.fake_service import WAIT_S, FakeService, FakeStream, RunningServer, serving
from tests.http.raw import chat, connect, post, read_all, read_response, read_until
from tidegate.api.connection import MAX_HEADER_BYTES, MAX_PIPELINED, MAX_PIPELINED_BODY_BYTES
from tidegate.api.service import Outcome
from tidegate.request import FinishReason

LIMIT_S = 0.2


@pytest.fixture(scope="module")
def impatient_server() -> Iterator[RunningServer]:
    with serving(FakeService(max_model_len=1_000_000), read_timeout=LIMIT_S, write_timeout=LIMIT_S) as running:
        yield running


@pytest.fixture
def impatient(impatient_server: RunningServer) -> RunningServer:
    impatient_server.service.reset()
    return impatient_server


class TestSlowWriters:
    def test_connection_that_says_nothing_is_closed(self, impatient: RunningServer) -> None:
        with connect(impatient) as sock:
            assert read_all(sock) == b""

    @pytest.mark.parametrize("start", [b"P", b"POST /v1/completions HTTP/1.1\r\nhost: t\r\n"])
    def test_headers_that_do_not_end_are_408(self, impatient: RunningServer, start: bytes) -> None:
        with connect(impatient) as sock:
            sock.sendall(start)
            assert read_all(sock).startswith(b"HTTP/1.1 408 ")

    def test_headers_that_do_not_end_on_a_used_connection_are_408(self, impatient: RunningServer) -> None:
        with connect(impatient) as sock:
            sock.sendall(b"GET /health/live HTTP/1.1\r\nhost: t\r\n\r\n")
            assert read_response(sock)[0] == 200
            sock.sendall(b"GET /health/live HT")
            assert read_all(sock).startswith(b"HTTP/1.1 408 ")

    def test_body_that_does_not_end_is_408(self, impatient: RunningServer) -> None:
        with connect(impatient) as sock:
            sock.sendall(chat()[:-5])
            answer = read_all(sock)
        assert answer.startswith(b"HTTP/1.1 408 ") and b'"code":"request_timeout"' in answer
        assert b"connection: close" in answer
        assert impatient.service.wait_outcomes(1) == [Outcome.BODY_TIMEOUT]

    def test_chunked_body_that_trickles_is_408(self, impatient: RunningServer) -> None:
        with connect(impatient) as sock:
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n1\r\n{\r\n")
            assert read_all(sock).startswith(b"HTTP/1.1 408 ")

    def test_waiting_long_for_an_answer_is_no_slowness(self, impatient: RunningServer) -> None:
        service = impatient.service
        service.reply = None
        with connect(impatient) as waits, connect(impatient) as idle:
            waits.sendall(chat())
            running = service.next_stream()
            assert read_all(idle) == b""  # its time is over, and that of the other's request would be too
            assert not running.is_closed.is_set()
            running.emit("a", FinishReason.STOP)
            assert read_response(waits)[0] == 200


class TestSlowReaders:
    def test_stream_that_is_not_read_ends_by_a_limit(self, impatient: RunningServer) -> None:
        service = impatient.service
        service.reply = None
        service.on_submit = lambda stream: stream.emit("first")
        with connect(impatient, receive_buffer=4096) as sock:
            sock.sendall(chat(stream=True))
            running = service.next_stream()
            read_until(sock, b"first")
            emit_until_closed(running)
            assert service.wait_outcome(running.request.request_id) is Outcome.SLOW_READER

    def test_whole_answer_that_is_not_read_ends_by_a_limit(self, impatient: RunningServer) -> None:
        service = impatient.service
        service.reply = "x" * 600
        with connect(impatient, receive_buffer=4096) as sock:
            sock.sendall(chat(logprobs=True, top_logprobs=20))  # about 600 kB
            service.next_stream()
            assert is_cut(sock)

    def test_slow_but_steady_reader_gets_all(self, server: RunningServer, service: FakeService) -> None:
        service.reply = "y" * 4000
        with connect(server, receive_buffer=4096) as sock:
            sock.sendall(chat(stream=True))
            data = b""
            while b"[DONE]" not in data:
                data += sock.recv(1000)
        assert data.count(b'"content":"') - 1 == data.count(b'"content":"y')
        assert data.count(b"y") >= 4000

    def test_readers_that_stop_do_not_disturb_the_others(self, impatient: RunningServer) -> None:
        service = impatient.service
        service.reply = None
        service.on_submit = lambda stream: stream.emit("first")
        with connect(impatient, receive_buffer=4096) as stuck, connect(impatient) as reads:
            stuck.sendall(chat(stream=True))
            stuck_stream = service.next_stream()
            reads.sendall(chat(stream=True))
            read_stream = service.next_stream()
            emit_until_closed(stuck_stream)
            read_stream.emit("last", FinishReason.STOP)
            assert b"last" in read_until(reads, b"[DONE]")


def emit_until_closed(stream: FakeStream) -> None:
    """An engine that goes on producing: 1,000 tokens a round, each waiting a little for the stream to be closed."""
    for _ in range(10_000):
        stream.emit("z" * 1000)
        if stream.is_closed.wait(0.002):
            return
    raise AssertionError("the stream was never closed")


def is_cut(sock: socket.socket) -> bool:
    """Whether the server resets the connection although nothing is read from it."""
    poll = select.poll()
    poll.register(sock, 0)  # errors and hang-ups are always reported
    return bool(poll.poll(WAIT_S * 1000))


class TestSizes:
    def test_body_beyond_the_limit_is_413_before_it_is_sent(self, server: RunningServer) -> None:
        with connect(server) as sock:
            sock.sendall(post("/v1/completions", b"")[:-4].replace(b"length: 0", b"length: 99999999") + b"\r\n\r\n")
            status, headers, body = read_response(sock)
        assert (status, headers["connection"]) == (413, "close")
        assert json.loads(body)["error"]["code"] == "request_too_large"

    def test_chunked_body_beyond_the_limit_is_413(self) -> None:
        with serving(max_body_size=2048) as server, connect(server) as sock:
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n")
            for _ in range(3):
                sock.sendall(b"400\r\n" + b"a" * 1024 + b"\r\n")
            assert read_response(sock)[0] == 413

    def test_body_of_ten_megabytes_is_refused(self, server: RunningServer, service: FakeService) -> None:
        with connect(server) as sock:
            with contextlib.suppress(OSError):  # closed while we were sending
                sock.sendall(post("/v1/completions", b'{"prompt": "%s"}' % (b"a" * 10_000_000)))
            assert is_cut(sock)
        assert service.wait_outcomes(1) == [Outcome.BODY_TOO_LARGE]

    @pytest.mark.parametrize("header", [b"x: " + b"a" * 40_000 + b"\r\n", b"a: b\r\n" * 5_000])
    def test_headers_beyond_the_limit_are_refused(self, server: RunningServer, header: bytes) -> None:
        with connect(server) as sock:
            sock.sendall(b"GET /health/live HTTP/1.1\r\nhost: t\r\n")
            with contextlib.suppress(OSError):
                for _ in range(20 * MAX_HEADER_BYTES // len(header)):
                    sock.sendall(header)
            assert is_cut(sock)


class TestPipelining:
    def test_pipelined_requests_are_answered_in_order(self, server: RunningServer) -> None:
        requests = [post("/tokenize", b'{"prompt": "%d"}' % index) for index in range(3)]
        with connect(server) as sock:
            sock.sendall(b"".join(requests))
            data = read_until(sock, b'"tokens":[50]')
        assert data.index(b'"tokens":[48]') < data.index(b'"tokens":[49]')

    def test_too_many_pipelined_requests_close_the_connection(
        self, server: RunningServer, service: FakeService
    ) -> None:
        service.reply = None
        with connect(server) as sock:
            sock.sendall(chat() * (MAX_PIPELINED + 3))
            running = service.next_stream()
            assert read_all(sock) == b""
        assert running.is_closed.wait(WAIT_S)

    def test_large_body_of_a_pipelined_request_closes_the_connection(
        self, server: RunningServer, service: FakeService
    ) -> None:
        service.reply = None
        with connect(server) as sock:
            sock.sendall(chat())
            running = service.next_stream()
            sock.sendall(post("/v1/completions", b"a" * (MAX_PIPELINED_BODY_BYTES + 300_000)))
            assert read_all(sock) == b""
        assert running.is_closed.wait(WAIT_S)


def test_connections_beyond_the_limit_are_503() -> None:
    with serving(max_connections=2) as server, connect(server) as first, connect(server) as second:
        for sock in (first, second):
            sock.sendall(b"GET /health/live HTTP/1.1\r\nhost: t\r\n\r\n")
            assert read_response(sock)[0] == 200
        with connect(server) as third:
            answer = read_all(third)
        assert answer.startswith(b"HTTP/1.1 503 ") and b"too_many_connections" in answer
