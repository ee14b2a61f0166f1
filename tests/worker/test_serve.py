"""`tidegate serve` as a process: how it starts, drains, loses its worker, and dies. Sim executor, tiny model."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.tiny_models import write_tiny_gguf
from tests.worker.served import ServedProcess

WAIT_S = 20.0
Serve = Callable[..., ServedProcess]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared, so that the model is converted once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def serve(model: Path, cache: Path, tmp_path: Path) -> Iterator[Serve]:
    started: list[ServedProcess] = []

    def start(*arguments: str) -> ServedProcess:
        env = {"XDG_CACHE_HOME": str(cache)}
        started.append(ServedProcess("--executor", "sim", "--model", str(model), *arguments, tmp=tmp_path, env=env))
        return started[-1]

    yield start
    for served in started:
        served.close()


def stream(client: httpx.Client, url: str, max_tokens: int) -> Any:
    body = {"model": "default", "prompt": "hello", "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
    return client.stream("POST", f"{url}/v1/completions", json=body)


def events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def complete(url: str, max_tokens: int = 3) -> httpx.Response:
    body = {"model": "default", "prompt": "hello", "max_tokens": max_tokens, "ignore_eos": True}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=WAIT_S)


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def leftovers(tmp: Path) -> list[str]:
    return [path.name for path in tmp.iterdir() if path.name.startswith("tidegate-")]


def test_the_banner_tells_what_is_served_and_how_much_fits(serve: Serve) -> None:
    served = serve("--kv-memory", "8MiB", "--max-model-len", "256", "--served-model-name", "small")
    url = served.wait_ready()
    banner = "\n".join(served.out)
    assert f"serves small at {url}" in banner
    assert "NOTHING IS COMPUTED" in banner
    assert "weights Q8_0, KV u8" in banner
    assert "requests of 256 tokens" in banner
    assert f"curl {url}" in banner
    assert httpx.get(f"{url}/v1/models").json()["data"][0]["max_model_len"] == 256
    assert complete(url).json()["usage"]["completion_tokens"] == 3
    assert 'tidegate_requests_total{outcome="length"} 1.0' in httpx.get(f"{url}/metrics").text
    served.process.send_signal(signal.SIGINT)
    assert served.wait() == 0


def test_a_signal_drains_and_a_second_one_does_not_shorten_it(serve: Serve) -> None:
    served = serve()
    url = served.wait_ready()
    worker = served.worker()
    with httpx.Client(timeout=WAIT_S) as client, stream(client, url, 150) as response:
        chunks = events(response.iter_lines())
        next(chunks)
        served.process.send_signal(signal.SIGTERM)
        served.until(lambda: httpx.get(f"{url}/health/ready").status_code == 503)
        served.process.send_signal(signal.SIGTERM)
        served.process.send_signal(signal.SIGINT)
        refused = complete(url)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert [chunk for chunk in chunks if chunk["choices"]][-1]["choices"][0]["finish_reason"] == "length"
    assert served.wait() == 0
    assert not worker.is_running()
    assert leftovers(served.tmp) == []


def test_what_outlasts_the_drain_timeout_is_ended(serve: Serve) -> None:
    served = serve("--drain-timeout", "100ms")
    url = served.wait_ready()
    with httpx.Client(timeout=WAIT_S) as client, stream(client, url, 480) as response:
        chunks = events(response.iter_lines())
        next(chunks)
        served.process.send_signal(signal.SIGTERM)
        finished = [choice["finish_reason"] for chunk in chunks for choice in chunk.get("choices", [])]
        assert "length" not in finished
    assert served.wait() == 0


def test_a_frontend_killed_with_9_leaves_no_worker_no_port_and_no_file(serve: Serve) -> None:
    served = serve()
    url = served.wait_ready()
    worker = served.worker()
    assert complete(url).status_code == 200
    served.process.kill()
    worker.wait(WAIT_S)
    assert not is_listening(served.port)
    assert leftovers(served.tmp) == []


def test_a_frontend_killed_while_the_worker_loads_leaves_nothing_either(serve: Serve) -> None:
    served = serve()
    worker = served.worker()
    served.process.kill()
    worker.wait(WAIT_S)
    assert leftovers(served.tmp) == []


def test_a_killed_worker_is_replaced_and_its_running_request_is_told(serve: Serve) -> None:
    served = serve()
    url = served.wait_ready()
    with httpx.Client(timeout=WAIT_S) as client, stream(client, url, 480) as response:
        chunks = events(response.iter_lines())
        next(chunks)
        os.kill(served.worker().pid, signal.SIGKILL)
        assert "error" in list(chunks)[-1]
    served.until(lambda: httpx.get(f"{url}/health/ready").status_code == 200)
    assert complete(url).status_code == 200


def test_hanging_up_gives_the_blocks_back(serve: Serve) -> None:
    served = serve("--no-enable-prefix-caching")
    url = served.wait_ready()
    with httpx.Client(timeout=WAIT_S) as client, stream(client, url, 480) as response:
        next(events(response.iter_lines()))
    cancelled, released = 'tidegate_requests_total{outcome="cancelled"} 1.0', 'tidegate_kv_blocks{state="held"} 0.0'
    served.until(lambda: cancelled in (metrics := httpx.get(f"{url}/metrics").text) and released in metrics)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--kv-memory", "64KiB", "--max-model-len", "512"), "does not fit the KV memory"),
        (("--max-model-len", "513"), "--max-model-len 513 is above the 512 tokens"),
        (("--kv-memory", "1KiB"), "less than one KV block"),
        (("--model", "no-such-model"), "no-such-model"),
    ],
)
def test_a_start_that_fails_is_one_line_and_exit_code_2(serve: Serve, arguments: tuple[str, ...], line: str) -> None:
    served = serve(*arguments)
    assert served.wait() == 2
    said = [one for one in served.err.splitlines() if not one.startswith(("loading", "checking", "converting"))]
    assert len(said) == 1
    assert said[0].startswith("tidegate: ")
    assert line in said[0]
    assert leftovers(served.tmp) == []


def test_a_busy_port_is_one_line_and_exit_code_2(serve: Serve) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        served = serve("--port", str(port))
        assert served.wait() == 2
    assert served.err.count("\n") == 1
    assert f"127.0.0.1:{port}" in served.err
