"""Tiers, objectives, time limits and decisions of admission, as clients send and see them. A fake service decides."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from tests.http.fake_service import FakeService
from tidegate.api.service import Outcome, Refused, Served

HI = [{"role": "user", "content": "Hi"}]
PATHS = ["/v1/chat/completions", "/v1/completions"]


def post(http: httpx.Client, path: str = PATHS[0], **fields: Any) -> httpx.Response:
    prompt: dict[str, Any] = {"messages": HI} if "chat" in path else {"prompt": "Hi"}
    return http.post(path, json={**prompt, **fields})


def chunks_of(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    ("asked", "tier"),
    [
        (None, "default"),
        ("auto", "default"),
        ("default", "default"),
        ("standard_only", "default"),
        ("priority", "priority"),
        ("scale", "priority"),
        ("fast", "priority"),
        ("flex", "flex"),
        ("night", "night"),
    ],
)
def test_names_of_tiers_are_those_of_clients_and_of_the_operator(
    http: httpx.Client, service: FakeService, asked: str | None, tier: str
) -> None:
    assert post(http, service_tier=asked).status_code == 200
    assert service.requests[-1].tier == tier


def test_an_unknown_tier_is_refused_with_the_allowed_ones(http: httpx.Client, service: FakeService) -> None:
    error = post(http, service_tier="gold").json()["error"]
    assert error["param"] == "service_tier"
    assert error["message"] == (
        "unknown service_tier 'gold'; allowed: priority, default, flex, night, auto, standard_only, scale, fast"
    )
    assert not service.requests


def test_objectives_reach_the_request_in_seconds(http: httpx.Client, service: FakeService) -> None:
    assert post(http, slo={"ttft_ms": 250, "tpot_ms": 40.5}).status_code == 200
    request = service.requests[-1]
    assert request.ttft_slo_s == pytest.approx(0.25)
    assert request.tpot_slo_s == pytest.approx(0.0405)
    assert post(http, slo={"ttft_ms": 250}).status_code == 200
    assert service.requests[-1].tpot_slo_s is None
    assert post(http, slo=None).status_code == 200
    assert service.requests[-1].ttft_slo_s is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"slo": 5}, "slo"),
        ({"slo": {"ttft_ms": "fast"}}, "slo.ttft_ms"),
        ({"slo": {"ttft_ms": 0}}, "slo.ttft_ms"),
        ({"slo": {"tpot_ms": -1}}, "slo.tpot_ms"),
        ({"slo": {"tpot_ms": 1e300}}, "slo.tpot_ms"),
        ({"slo": {"ttft": 5}}, "slo"),
        ({"slo": {"ttft_ms": True}}, "slo.ttft_ms"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"timeout_s": "1s"}, "timeout_s"),
        ({"timeout_s": 1e9}, "timeout_s"),
        ({"service_tier": 5}, "service_tier"),
    ],
)
def test_a_malformed_objective_is_a_400_that_names_it(
    http: httpx.Client, service: FakeService, fields: dict[str, Any], param: str
) -> None:
    response = post(http, **fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert not service.requests


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("streams", [False, True])
def test_the_tier_that_is_served_and_what_was_changed_are_told(
    http: httpx.Client, service: FakeService, path: str, streams: bool
) -> None:
    decision = "downgrade; reason=ttft_unreachable; changes=clamp:256,tier:flex; predicted_ttft_ms=840"
    service.served_as = Served("flex", decision)
    response = post(http, path, stream=streams, service_tier="priority", stream_options=None)
    assert response.headers["x-tidegate-admission"] == decision
    documents = chunks_of(response) if streams else [response.json()]
    assert documents
    assert {document["service_tier"] for document in documents} == {"flex"}


def test_of_several_prompts_the_one_that_got_least_is_told(http: httpx.Client, service: FakeService) -> None:
    decisions = [("default", "admit; reason=x"), ("flex", "downgrade; reason=x"), ("default", "queue; reason=x")]
    told = iter(Served(*decision) for decision in decisions)

    def serve(stream: Any) -> None:
        stream.served_as = next(told)

    service.on_submit = serve
    response = http.post("/v1/completions", json={"prompt": ["a", "b", "c"]})
    assert response.headers["x-tidegate-admission"].startswith("downgrade")
    assert response.json()["service_tier"] == "flex"


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    "outcome",
    [Outcome.TTFT_UNREACHABLE, Outcome.TPOT_UNREACHABLE, Outcome.OTHERS_TTFT, Outcome.LONG_SHARE, Outcome.QUEUE_FULL],
)
def test_a_refusal_is_a_429_with_its_decision_also_when_streamed(
    http: httpx.Client, service: FakeService, outcome: Outcome, streams: bool
) -> None:
    service.refuse = Refused(outcome, "too much", retry_after_s=3.2, numbers={"predicted_ttft_ms": 4100.7})
    response = post(http, stream=streams)
    assert response.status_code == 429
    assert response.headers["retry-after"] == "4"
    assert response.headers["x-should-retry"] == "true"
    assert response.headers["x-tidegate-admission"] == f"reject; reason={outcome}; predicted_ttft_ms=4101"
    assert response.json()["error"]["code"] == outcome


def test_a_refusal_out_of_the_queue_is_a_429_too(http: httpx.Client, service: FakeService) -> None:
    service.reply = None
    service.on_submit = lambda stream: stream.fail(Refused(Outcome.TTFT_UNREACHABLE, "too late", numbers={}))
    response = post(http, stream=True)
    assert response.status_code == 429
    assert response.headers["x-tidegate-admission"] == "reject; reason=ttft_unreachable"


def test_a_default_client_tries_again_after_a_refusal(service: FakeService, server: Any) -> None:
    refusals = iter([Refused(Outcome.TTFT_UNREACHABLE, "busy", retry_after_s=0.01, numbers={})])

    def refuse_once(stream: Any) -> None:
        for refused in refusals:
            raise refused

    service.on_submit = refuse_once
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=20) as client:
        answer = client.chat.completions.create(model="default", messages=HI)  # type: ignore[arg-type]
    assert answer.choices[0].finish_reason == "stop"
    assert service.wait_outcomes(2) == [Outcome.TTFT_UNREACHABLE, Outcome.STOP]


def test_a_long_prompt_is_judged_before_it_is_tokenized(
    http: httpx.Client, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert service.served is not None
    service.refuse = Refused(Outcome.QUEUE_FULL, "full", numbers={})
    monkeypatch.setattr(service.served.tokenizer, "encode", lambda *_, **__: pytest.fail("tokenized"))
    response = http.post("/v1/completions", json={"prompt": "a" * 3600, "service_tier": "flex", "max_tokens": 7})
    assert response.status_code == 429
    (least,) = service.least_requests
    longest = 12  # bytes of a token: "<|im_start|>"
    assert (least.num_prompt_tokens, least.max_tokens, least.tier) == (3600 // longest, 7, "flex")
    assert not service.requests
    assert service.wait_outcomes(1) == [Outcome.QUEUE_FULL]


def test_an_answer_that_a_clamp_cut_is_no_success(http: httpx.Client, service: FakeService) -> None:
    service.served_as = Served("default", "downgrade; reason=long_output; changes=clamp:4", is_clamped=True)
    cut = post(http, max_tokens=4).json()
    assert cut["choices"][0]["finish_reason"] == "length"
    assert service.wait_outcome(cut["id"]) is Outcome.CLAMPED
    whole = post(http, max_tokens=100).json()
    assert service.wait_outcome(whole["id"]) is Outcome.STOP


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("streams", [False, True])
def test_a_time_limit_ends_an_answer_with_what_it_has(
    http: httpx.Client, service: FakeService, path: str, streams: bool
) -> None:
    service.reply = None
    service.on_submit = lambda stream: stream.emit("so far ")
    response = post(http, path, stream=streams, timeout_s=0.2, max_tokens=1000)
    assert response.status_code == 200
    documents = chunks_of(response) if streams else [response.json()]
    choices = [choice for document in documents for choice in document["choices"]]
    assert "so far" in json.dumps(choices)
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
    stream = service.next_stream()
    assert stream.is_closed.is_set()
    assert service.wait_outcome(stream.request.request_id) is Outcome.TIMEOUT


def test_a_time_limit_without_a_token_is_a_408_that_is_not_tried_again(
    http: httpx.Client, service: FakeService
) -> None:
    service.reply = None
    response = post(http, stream=True, timeout_s=0.05)
    assert response.status_code == 408
    assert response.headers["x-should-retry"] == "false"
    assert response.json()["error"]["code"] == "timeout"
    assert service.next_stream().is_closed.is_set()
    assert service.wait_outcomes(1) == [Outcome.TIMEOUT]


def test_a_time_limit_that_is_not_reached_changes_nothing(http: httpx.Client, service: FakeService) -> None:
    answer = post(http, timeout_s=60).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert service.wait_outcome(answer["id"]) is Outcome.STOP
