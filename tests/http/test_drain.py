"""Starting on a port, and stopping: what runs may finish, what is new is told to go elsewhere."""

from __future__ import annotations

import httpx
import pytest

from tests.http.fake_service import WAIT_S, FakeService, serving
from tests.http.raw import chat, connect, read_all, read_response, read_until
from tests.http.test_fields import TEXT, refusal
from tidegate.api.server import bind
from tidegate.api.service import Outcome
from tidegate.config import ConfigError, ServerConfig
from tidegate.request import FinishReason


def test_running_requests_finish_and_new_ones_are_refused_while_draining() -> None:
    service = FakeService()
    service.reply = None
    service.on_submit = lambda stream: stream.emit("first")
    with serving(service, drain_timeout=WAIT_S) as server, httpx.Client(base_url=server.url) as http:
        with connect(server) as sock:
            sock.sendall(chat(stream=True))
            read_until(sock, b"first")
            for _ in range(2):  # a repeated signal changes nothing
                server.call(server.server.begin_drain)
                assert http.get("/health/live").status_code == 200
            assert http.get("/health/ready").json() == {"status": "draining"}
            response = http.post("/v1/completions", json=TEXT)
            assert refusal(response, 503)[0] == "draining"
            assert response.headers["x-should-retry"] == "true"
            service.next_stream().emit("last", FinishReason.STOP)
            assert b"last" in read_until(sock, b"[DONE]")
        server.thread.join(WAIT_S)
        assert not server.thread.is_alive()
    with pytest.raises(OSError):
        connect(server)


def test_what_outlasts_the_drain_is_cut_off_with_an_error() -> None:
    service = FakeService()
    service.reply = None
    with serving(service, drain_timeout=0.05) as server, connect(server) as waits, connect(server) as streams:
        waits.sendall(chat())
        waiting = service.next_stream()
        service.on_submit = lambda stream: stream.emit("first")
        streams.sendall(chat(stream=True))
        streaming = service.next_stream()
        read_until(streams, b"first")
        server.call(server.server.begin_drain)
        status, _, body = read_response(waits)
        assert (status, b'"draining"' in body) == (503, True)
        rest = read_all(streams)
        assert b'"draining"' in rest and b"[DONE]" not in rest
    assert waiting.is_closed.is_set() and streaming.is_closed.is_set()
    assert list(service.outcomes.values()) == [Outcome.DRAINING] * 2


def test_busy_port_is_one_clear_line() -> None:
    with serving() as server, pytest.raises(ConfigError, match=rf"127.0.0.1:{server.port}.*in use.*--port"):
        bind(ServerConfig(port=server.port))


def test_unknown_host_is_one_clear_line() -> None:
    with pytest.raises(ConfigError, match="--host"):
        bind(ServerConfig(host="no.such.host.invalid", port=0))
