"""`bench serve` and `bench sweep` from the command line to the report, against a server that takes a known load."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.bench.fake_server import completion_events, stream_bytes
from tidegate.bench import serve
from tidegate.cli import main

MODELS = b'{"data":[{"id":"tiny"}]}'


class TinyServer:
    """Answers at once up to `max_requests`, then refuses. Runs in a thread of its own."""

    def __init__(self, max_requests: int) -> None:
        self.max_requests = max_requests
        self.bodies: list[dict[str, Any]] = []
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> TinyServer:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def _run(self) -> None:
        server = self._loop.run_until_complete(asyncio.start_server(self._answer, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()
        server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET /v1/models"):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(MODELS), MODELS))
        else:
            length = int(next(line for line in head.lower().split(b"\r\n") if b"content-length" in line).split()[1])
            body = json.loads(await reader.readexactly(length))
            self.bodies.append(body)
            if len(self.bodies) > self.max_requests:
                error = b'{"error":{"code":"queue_full"}}'
                writer.write(b"HTTP/1.1 429 Busy\r\nContent-Length: %d\r\n\r\n%b" % (len(error), error))
            else:
                writer.write(stream_bytes(completion_events(body["max_tokens"])))
        await writer.drain()
        writer.close()


@pytest.fixture
def workload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(serve, "settle_garbage_collection", lambda: None)  # it is this process's own business
    path = tmp_path / "small.toml"
    path.write_text(
        """
        arrivals = { kind = "constant" }
        [[classes]]
        prompt = { kind = "fixed", tokens = 8 }
        output = { kind = "fixed", tokens = 4 }
        """
    )
    yield str(path)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["tidegate", "bench", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


def test_servers_are_compared_on_the_same_work(
    workload: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with TinyServer(1_000) as fast, TinyServer(8) as full:
        code = run(
            monkeypatch, "serve", "--url", f"fast=http://127.0.0.1:{fast.port}", "--url",
            f"full=http://127.0.0.1:{full.port}/v1", "--workload", workload, "--rate", "100", "--duration", "105ms",
            "--ttft-slo", "10s", "--tpot-slo", "10s", "--json", str(tmp_path / "r.json"), "--html",
            str(tmp_path / "r.html"),
        )  # fmt: skip
    assert code == 0
    document = json.loads((tmp_path / "r.json").read_text())
    figures = document["servers"]
    assert figures["fast"]["outcomes"] == {"good": 10}
    assert figures["full"]["outcomes"] == {"good": 6, "refused": 4}  # two of its eight were the warm-up
    assert figures["full"]["refusals"]["by_code"]["queue_full"]["count"] == 4
    assert [len(body["prompt"]) for body in fast.bodies] == [8] * 12
    assert fast.bodies[0]["model"] == "tiny"
    prompts = {tuple(body["prompt"]) for body in fast.bodies + full.bodies}
    assert len(prompts) == len(fast.bodies + full.bodies), "a prompt was sent twice: a cache would help"
    assert "goodput ratio" in capsys.readouterr().out
    assert "<svg" in (tmp_path / "r.html").read_text()


def test_one_that_is_not_there_is_told_and_left_out(
    workload: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with TinyServer(1_000) as server:
        code = run(
            monkeypatch, "serve", "--url", "gone=http://127.0.0.1:1", "--url", f"http://127.0.0.1:{server.port}",
            "--workload", workload, "--rate", "50", "--duration", "105ms", "--json", "-",
        )  # fmt: skip
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert code == 0
    assert list(document["servers"]) == [f"127.0.0.1:{server.port}"]
    assert "cannot connect" in document["problems"][0]
    assert document["unloaded"][f"127.0.0.1:{server.port}"]["ttft_ms"]["all"] > 0


def test_a_sweep_draws_goodput_over_load(workload: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with TinyServer(1_000) as server:
        code = run(
            monkeypatch, "sweep", "--url", f"a=http://127.0.0.1:{server.port}", "--workload", workload, "--rates",
            "30,60", "--duration", "105ms", "--ttft-slo", "10s", "--tpot-slo", "10s", "--json",
            str(tmp_path / "r.json"),
        )  # fmt: skip
    assert code == 0
    sweep = json.loads((tmp_path / "r.json").read_text())["servers"]["a"]
    assert [(point["rate"], point["outcomes"]) for point in sweep["curve"]] == [(30, {"good": 3}), (60, {"good": 6})]
    assert sweep["capacity"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--url", "nowhere"], "is not an address"),
        (["serve", "--url", "http://h", "--workload", "hevy"], "did you mean heavy"),
        (["serve", "--url", "http://h", "--ttft-slo", "soon"], "--ttft-slo takes"),
        (["serve", "--url", "http://h", "--duration", "0s"], "--duration must be above 0"),
        (["serve", "--url", "http://h", "--json", "/no/such/folder/x"], "no such folder"),
        (["serve", "--url", "http://127.0.0.1:1"], "none of the servers could be measured"),
        (["sweep", "--url", "http://h", "--rates", "1,a"], "--rates takes numbers"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *arguments) == 2
    last_line = capsys.readouterr().err.strip().splitlines()[-1]
    assert last_line.startswith("tidegate: ")
    assert message in last_line
