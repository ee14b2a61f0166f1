"""Chat and explain, against a small HTTP server that speaks as a tidegate server does."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from rich.console import Console

from tidegate.metrics.timeline import Timeline
from tidegate.request import PrefillTimes, RequestOutput
from tidegate.terminal import TerminalError
from tidegate.terminal.chat import Chat
from tidegate.terminal.client import ServerClient
from tidegate.terminal.explain import print_timeline, spans


@dataclass
class Script:
    """What the server answers a chat with, and what it was asked."""

    pieces: list[str] = field(default_factory=lambda: ["Hel", "lo"])
    status: int = 200
    error: str = ""
    api_key: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)

    def events(self) -> Iterator[dict[str, Any]]:
        yield {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
        for piece in self.pieces:
            yield {"choices": [{"index": 0, "delta": {"content": piece}}]}
        if self.error:
            yield {"error": {"message": self.error}}
            return
        yield {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
        details = {"cached_tokens": 32}
        yield {"choices": [], "usage": {"prompt_tokens": 40, "completion_tokens": 2, "prompt_tokens_details": details}}


@contextmanager
def serving(script: Script) -> Iterator[str]:
    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if script.api_key and self.headers["authorization"] != f"Bearer {script.api_key}":
                self._json(401, {"error": {"message": "no"}})
            elif self.path == "/v1/models":
                self._json(200, {"data": [{"id": "tiny"}]})
            else:
                self._json(404, {"error": {"message": f"no request {self.path.rpartition('/')[2]}"}})

        def do_POST(self) -> None:
            script.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            if script.status != 200:
                self._json(script.status, {"error": {"message": "the queue is full"}})
                return
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            for event in script.events():
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            self.wfile.write(b"" if script.error else b"data: [DONE]\n\n")

        def _json(self, status: int, document: dict[str, Any]) -> None:
            body = json.dumps(document).encode()
            self.send_response(status)
            if status == 429:
                self.send_header("retry-after", "3")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def quiet_console() -> Console:
    return Console(file=io.StringIO(), width=120, soft_wrap=True, highlight=False)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_an_answer_streams_and_the_conversation_goes_on() -> None:
    script, console = Script(), quiet_console()
    with serving(script) as url, ServerClient(url) as client:
        chat = Chat(client, system="Be brief.", max_tokens=2, console=console, interactive=True)
        assert chat.ask("Hi") == "Hello"
        assert chat.ask("More") == "Hello"
    assert "Hello\n" in written(console)
    assert "2 tokens" in written(console)
    assert "32 of 40 prompt tokens from the cache" in written(console)
    assert "cut at the token limit" in written(console)
    assert [message["role"] for message in script.bodies[1]["messages"]] == ["system", "user", "assistant", "user"]
    assert script.bodies[0]["max_tokens"] == 2
    assert script.bodies[0]["stream"] is True
    assert "temperature" not in script.bodies[0]


def test_control_codes_of_the_model_do_not_reach_the_terminal() -> None:
    script, console = Script(pieces=["a\x1b[31mb\r\x07\x9b2J", "[bold]c[/bold]\n\td"]), quiet_console()
    with serving(script) as url, ServerClient(url) as client:
        answer = Chat(client, console=console, interactive=False).ask("Hi")
    assert written(console).startswith("a[31mb2J[bold]c[/bold]\n")
    assert answer.startswith("a\x1b[31mb")


def test_ctrl_c_keeps_what_came_and_the_conversation() -> None:
    class Interrupted(ServerClient):
        def chat(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
            yield {"choices": [{"delta": {"content": "Half an ans"}}]}
            raise KeyboardInterrupt

    console = quiet_console()
    with Interrupted("http://127.0.0.1:9") as client:
        chat = Chat(client, console=console, interactive=True)
        assert chat.ask("Hi") == "Half an ans"
    assert chat.messages[-1] == {"role": "assistant", "content": "Half an ans"}
    assert "stopped" in written(console)


def test_a_refusal_is_told_and_leaves_the_conversation_as_it_was() -> None:
    script = Script(status=429)
    with serving(script) as url, ServerClient(url) as client:
        chat = Chat(client, console=quiet_console(), interactive=True)
        with pytest.raises(TerminalError, match=r"the queue is full \(retry in 3 s\)"):
            chat.ask("Hi")
    assert chat.messages == []


def test_an_error_in_the_stream_is_told() -> None:
    with serving(Script(error="the worker died")) as url, ServerClient(url) as client:
        chat = Chat(client, console=quiet_console(), interactive=False)
        with pytest.raises(TerminalError, match="broke off: the worker died"):
            chat.ask("Hi")


def test_lines_of_a_pipe_are_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    script, console = Script(), quiet_console()
    monkeypatch.setattr("sys.stdin", io.StringIO("first\n\nsecond\n"))
    with serving(script) as url, ServerClient(url) as client:
        Chat(client, console=console, interactive=False).run()
    assert written(console) == "Hello\nHello\n"
    assert [body["messages"][-1]["content"] for body in script.bodies] == ["first", "second"]


def test_a_missing_key_is_asked_for() -> None:
    with serving(Script(api_key="secret")) as url:
        with ServerClient(url) as client, pytest.raises(TerminalError, match="--api-key"):
            client.models()
        with ServerClient(url + "/v1", "secret") as client:
            assert client.models() == ["tiny"]


def test_an_unknown_request_is_told_in_the_servers_words() -> None:
    with serving(Script()) as url, ServerClient(url) as client, pytest.raises(TerminalError, match="no request abc"):
        client.timeline("abc")


def answered() -> Timeline:
    timeline = Timeline("request-1", 1.0, num_prompt_tokens=64, tokenized_s=1.1, queued_s=1.1, dispatched_s=3.1)
    prefill = PrefillTimes(3.1, 3.2, 3.5, 0.25, 0.05, num_cached_tokens=32)
    timeline.on_output(RequestOutput("request-1", 0, [5], 3.5, prefill=prefill), 3.5)
    timeline.on_output(RequestOutput("request-1", 0, [6], 4.5), 4.5)
    timeline.finish("stop", 4.5)
    return timeline


def test_a_timeline_is_shown_with_its_parts_and_its_cause() -> None:
    console = quiet_console()
    print_timeline(answered().as_dict(), console=console)
    text = written(console)
    for words in (
        "request-1: stop",
        "64 prompt tokens (32 cached)",
        "gate wait",
        "2.00 s",
        "TTFT 2.50 s, most of it: ",
    ):
        assert words in text
    assert "most of it: queue" in text


def test_the_stages_follow_each_other_without_gaps() -> None:
    stages = spans(answered().as_dict())
    ends_s = [start_s + length_s for _, start_s, length_s in stages]
    assert [start_s for _, start_s, _ in stages] == pytest.approx([0.0, *ends_s[:-1]])
    assert ends_s[-1] == pytest.approx(3.5)


def test_a_request_that_never_got_a_token_is_shown_too() -> None:
    timeline = Timeline("request-2", 1.0, tokenized_s=1.1, queued_s=1.1)
    timeline.finish("queue_timeout", 5.0)
    console = quiet_console()
    print_timeline(timeline.as_dict(), console=console)
    assert "most of the time went to: queue" in written(console)
    assert spans(timeline.as_dict())[-1][0] == "queue"
