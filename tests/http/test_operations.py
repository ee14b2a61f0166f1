"""Models, tokenize, detokenize, health, metrics, version and the timeline of a request."""

from __future__ import annotations

import threading

import httpx
import openai
import pytest

from tests.http.fake_service import WAIT_S, FakeService
from tests.http.test_fields import CHAT, TEXT, refusal
from tidegate.api.service import HealthReason
from tidegate.version import __version__


def test_models_are_listed_with_their_length(client: openai.OpenAI, http: httpx.Client) -> None:
    assert [model.id for model in client.models.list()] == ["fake-model"]
    assert client.models.retrieve("default").id == "fake-model"
    assert http.get("/v1/models").json()["data"][0]["max_model_len"] == 4096


def test_text_and_chats_are_tokenized_as_they_would_be_served(http: httpx.Client, service: FakeService) -> None:
    answer = http.post("/tokenize", json={"prompt": "hé", "return_token_strs": True}).json()
    assert answer == {"tokens": list("hé".encode()), "count": 3, "max_model_len": 4096, "token_strs": ["h", "�", "�"]}
    chat = http.post("/tokenize", json={"messages": CHAT["messages"]}).json()
    http.post("/v1/chat/completions", json=CHAT)
    assert chat["tokens"] == service.requests[0].prompt_token_ids


def test_detokenize_is_the_way_back(http: httpx.Client) -> None:
    assert http.post("/detokenize", json={"tokens": list("hé".encode())}).json() == {"prompt": "hé"}
    assert refusal(http.post("/detokenize", json={"tokens": [9999]}))[1] == "tokens"


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": []}, {"prompt": 5}, {"messages": []}])
def test_wrong_tokenize_bodies_are_refused(http: httpx.Client, body: dict[str, object]) -> None:
    refusal(http.post("/tokenize", json=body))


@pytest.mark.parametrize(
    ("reason", "status"),
    [("ready", 200), ("loading", 503), ("draining", 503), ("stalled", 503), ("no_workers", 503)],
)
def test_ready_only_when_requests_are_served(
    http: httpx.Client, service: FakeService, reason: HealthReason, status: int
) -> None:
    service.reason = reason
    for path in ("/health", "/health/ready"):
        response = http.get(path)
        assert (response.status_code, response.json()["status"]) == (status, reason)
    assert http.get("/health/live").status_code == 200


def test_while_loading_generation_is_refused(http: httpx.Client, service: FakeService) -> None:
    service.served = None
    assert refusal(http.post("/v1/completions", json=TEXT), 503)[0] == "loading"
    assert refusal(http.get("/v1/models"), 503)[0] == "loading"


def test_metrics_and_version(http: httpx.Client) -> None:
    metrics = http.get("/metrics")
    assert metrics.text == "tidegate_up 1\n"
    assert metrics.headers["content-type"] == "text/plain; version=0.0.4"
    assert http.get("/version").json() == {"version": __version__}


def test_timeline_of_a_known_request(http: httpx.Client) -> None:
    request_id = http.post("/v1/completions", json=TEXT).json()["id"]
    assert http.get(f"/debug/requests/{request_id}").json() == {"request_id": request_id}
    assert refusal(http.get("/debug/requests/cmpl-unknown"), 404)[0] == "not_found"


def test_health_answers_while_a_long_prompt_is_tokenized(
    http: httpx.Client, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert service.served is not None
    is_encoding, may_end = threading.Event(), threading.Event()

    def encode(*_: object, **__: object) -> list[int]:
        is_encoding.set()
        assert may_end.wait(WAIT_S)
        return [65]

    monkeypatch.setattr(service.served.tokenizer, "encode", encode)
    long = threading.Thread(target=http.post, args=("/v1/completions",), kwargs={"json": {"prompt": "a " * 3000}})
    long.start()
    assert is_encoding.wait(WAIT_S)
    with httpx.Client(base_url=http.base_url, timeout=WAIT_S) as other:
        assert other.get("/health/ready").status_code == 200
    may_end.set()
    long.join(WAIT_S)
    assert service.requests[0].prompt_token_ids == [65]
