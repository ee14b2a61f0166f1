"""Admission in a real `tidegate serve` on the sim executor: overload, late refusals, reloads, bad configuration."""

from __future__ import annotations

import contextlib
import signal
import threading
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

    def start(toml: str = "", *arguments: str) -> ServedProcess:
        (tmp_path / "config.toml").write_text(toml)
        config = ("--config", str(tmp_path / "config.toml"))
        env = {"XDG_CACHE_HOME": str(cache)}
        basics = ("--executor", "sim", "--model", str(model))
        started.append(ServedProcess(*basics, *config, *arguments, tmp=tmp_path, env=env))
        return started[-1]

    yield start
    for served in started:
        served.close()


def complete(url: str, max_tokens: int = 3, **fields: Any) -> httpx.Response:
    body = {"model": "default", "prompt": "hello", "max_tokens": max_tokens, "ignore_eos": True, **fields}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=WAIT_S)


class Background:
    """Requests under way, each on a thread of its own."""

    def __init__(self, url: str, count: int, **fields: Any) -> None:
        self.responses: list[httpx.Response] = []

        def run() -> None:
            with contextlib.suppress(httpx.TransportError):  # the test has ended, and the server with it
                self.responses.append(complete(url, **fields))

        self._threads = [threading.Thread(target=run) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def wait(self) -> list[httpx.Response]:
        for thread in self._threads:
            thread.join(WAIT_S)
        return self.responses


def metric(url: str, line: str) -> bool:
    return line in httpx.get(f"{url}/metrics").text


def test_a_served_request_tells_its_tier_and_what_was_predicted(serve: Serve) -> None:
    url = serve().wait_ready()
    response = complete(url, service_tier="flex")
    assert response.json()["service_tier"] == "flex"
    assert response.headers["x-tidegate-admission"].startswith("admit; reason=fits; predicted_ttft_ms=")
    assert metric(url, 'tidegate_admission_total{action="admit",reason="fits",tier="flex"} 1.0')
    assert metric(url, 'tidegate_ttft_prediction_error_ratio_count{tier="flex"} 1.0')
    timeline = httpx.get(f"{url}/debug/requests/{response.headers['x-request-id']}").json()
    assert timeline["decision"]["action"] == "admit"
    assert timeline["decision"]["served_tier"] == "flex"


def test_an_objective_out_of_reach_is_refused_at_once_also_when_streamed(serve: Serve) -> None:
    url = serve().wait_ready()
    for streams in (False, True):
        response = complete(url, slo={"ttft_ms": 1}, stream=streams)
        assert response.status_code == 429
        assert response.json()["error"]["code"] == "ttft_unreachable"
        assert response.headers["x-tidegate-admission"].startswith("reject; reason=ttft_unreachable")
        assert int(response.headers["retry-after"]) >= 1
    assert metric(url, 'tidegate_requests_total{outcome="ttft_unreachable"} 2.0')


def test_a_request_that_waits_in_vain_is_answered_429_before_its_objective_has_passed(serve: Serve) -> None:
    # Answers turn out far longer than the first ones taught, so what was to be served in time waits in vain.
    served = serve("", "--max-num-seqs", "1")
    url = served.wait_ready()
    for _ in range(4):
        assert complete(url, max_tokens=1).status_code == 200
    blocker = Background(url, 3, max_tokens=480, service_tier="priority", slo={"ttft_ms": 60_000})
    served.until(lambda: metric(url, "tidegate_requests_running 1.0"))
    response = complete(url, slo={"ttft_ms": 1500}, stream=True)
    assert response.status_code == 429
    assert response.json()["error"]["code"] == "ttft_unreachable"
    assert response.elapsed.total_seconds() < 1.5
    served.close()
    blocker.wait()


def test_a_time_limit_ends_a_running_answer_with_what_it_has(serve: Serve) -> None:
    served = serve()
    url = served.wait_ready()
    response = complete(url, max_tokens=480, timeout_s=0.5)
    assert response.status_code == 200
    document = response.json()
    assert document["choices"][0]["finish_reason"] == "length"
    assert 0 < document["usage"]["completion_tokens"] < 480
    served.until(lambda: metric(url, "tidegate_requests_running 0.0"))
    assert metric(url, 'tidegate_requests_total{outcome="timeout"} 1.0')


def test_a_clamp_that_cuts_an_answer_counts_as_clamped(serve: Serve) -> None:
    url = serve('[tiers.default]\nmax_expected_output = 5\ndowngrade = ["clamp:4"]\n').wait_ready()
    response = complete(url, max_tokens=50)
    assert response.json()["usage"]["completion_tokens"] == 4
    assert response.headers["x-tidegate-admission"].startswith("downgrade; reason=long_output; changes=clamp:4")
    assert metric(url, 'tidegate_requests_total{outcome="clamped"} 1.0')


def test_observing_serves_all_and_says_what_it_would_have_done(serve: Serve) -> None:
    url = serve('[gate]\nadmission = "observe"\n').wait_ready()
    response = complete(url, slo={"ttft_ms": 1})
    assert response.status_code == 200
    assert response.headers["x-tidegate-admission"].startswith("observe; would=reject; reason=ttft_unreachable")
    assert metric(url, 'tidegate_admission_total{action="reject",reason="ttft_unreachable",tier="default"} 1.0')


def test_a_hangup_reloads_tiers_and_a_bad_file_changes_nothing(serve: Serve, tmp_path: Path) -> None:
    served = serve("[tiers.gold]\nrank = 0\n")
    url = served.wait_ready()
    assert complete(url, service_tier="gold").json()["service_tier"] == "gold"
    config = tmp_path / "config.toml"

    config.write_text("[tiers.silver]\nrank = 0\n[gate]\nmax_queud = 5\n")
    served.process.send_signal(signal.SIGHUP)
    served.until(lambda: "the configuration stays as it is" in served.err)
    (line,) = [line for line in served.err.splitlines() if "stays as it is" in line]
    assert "unknown config key 'gate.max_queud'; did you mean 'max_queued'?" in line
    assert complete(url, service_tier="gold").status_code == 200
    assert complete(url, service_tier="silver").status_code == 400

    config.write_text("[tiers.silver]\nrank = 0\n[scheduler]\nmax_num_seqs = 3\n")
    served.process.send_signal(signal.SIGHUP)
    served.until(lambda: "configuration read again; changed: tiers" in served.err)
    served.until(lambda: "take effect at the next start: scheduler" in served.err)
    assert complete(url, service_tier="silver").json()["service_tier"] == "silver"
    refused = complete(url, service_tier="gold")
    assert refused.status_code == 400
    assert "allowed: priority, default, flex, silver" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("toml", "line"),
    [
        ('[tiers.gold]\nttft_slo = "soon"\n', "tiers.gold.ttft_slo"),
        ('[tiers.gold]\ndowngrade = ["tier:bronze"]\n', "bronze"),
        ('[tiers.gold]\ndowngrade = ["clamp:0"]\n', "clamp:0"),
        ('[gate]\nadmission = "maybe"\n', "gate.admission"),
    ],
)
def test_a_bad_file_at_the_start_is_one_line_and_exit_code_2(serve: Serve, toml: str, line: str) -> None:
    served = serve(toml)
    assert served.wait() == 2
    assert served.err.count("\n") == 1
    assert line in served.err
