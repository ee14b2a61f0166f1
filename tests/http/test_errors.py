"""Every failure has OpenAI's error body, its status, and advice on trying again."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from tests.http.fake_service import FakeService, RunningServer, serving
from tests.http.raw import connect, post, read_all, read_response
from tests.http.test_fields import CHAT, TEXT, refusal
from tidegate.api.service import Outcome, Refused
from tidegate.request import InvalidRequest


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("in_queue", [False, True])
@pytest.mark.parametrize(
    ("outcome", "status", "retries"),
    [
        (Outcome.QUEUE_FULL, 429, "true"),
        (Outcome.QUEUE_TIMEOUT, 429, "true"),
        (Outcome.NO_WORKERS, 503, "true"),
        (Outcome.DRAINING, 503, "true"),
        (Outcome.NEVER_FITS, 400, "false"),
    ],
)
def test_refusal_keeps_its_status_also_when_it_comes_late_and_to_a_stream(
    http: httpx.Client, service: FakeService, outcome: Outcome, status: int, retries: str, in_queue: bool, streams: bool
) -> None:
    refused = Refused(outcome, "7 are waiting", retry_after_s=2.4 if status != 400 else None)
    service.reply = None
    if in_queue:
        service.on_submit = lambda stream: stream.fail(refused)
    else:
        service.refuse = refused
    response = http.post("/v1/chat/completions", json={**CHAT, "stream": streams})
    assert refusal(response, status) == (str(outcome), None, "7 are waiting")
    assert response.headers["x-should-retry"] == retries
    assert response.headers.get("retry-after") == ("3" if retries == "true" else None)
    assert service.wait_outcome(response.headers["x-request-id"]) is outcome


def test_refusal_of_one_of_several_prompts_closes_the_others(http: httpx.Client, service: FakeService) -> None:
    service.reply = None
    service.on_submit = lambda stream: setattr(service, "refuse", Refused(Outcome.QUEUE_FULL, "full"))
    response = http.post("/v1/completions", json={"prompt": ["a", "b"]})
    assert refusal(response, 429)[0] == "queue_full"
    assert service.next_stream().is_closed.is_set()
    assert service.wait_outcomes(2) == [Outcome.QUEUE_FULL] * 2


def test_late_refusal_of_one_of_several_prompts_closes_the_others(http: httpx.Client, service: FakeService) -> None:
    service.reply = None

    def second_fails(stream: Any) -> None:
        if len(service.requests) == 1:
            stream.fail(Refused(Outcome.QUEUE_TIMEOUT, "waited too long"))

    service.on_submit = second_fails
    response = http.post("/v1/completions", json={"prompt": ["a", "b"]})
    assert refusal(response, 429)[0] == "queue_timeout"
    assert all(service.next_stream().is_closed.is_set() for _ in range(2))


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"5", b"null", b'"x"', b"{'a': 1}", b'{"a": NaN}', b'{"a": Infinity}', b'{"a": 1e999}',
        b'\xff\xfe{"a": 1}', b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b'{"prompt": "a"} x',
        b"[" * 100_000, b'{"a":' * 100_000, b'{"prompt": "a", "x": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", b"\x00" * 100,
    ],
)  # fmt: skip
def test_what_is_no_json_object_is_refused(http: httpx.Client, service: FakeService, body: bytes) -> None:
    response = http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert refusal(response)[0] == "invalid_json"
    assert not service.requests


def test_deep_nesting_within_a_message_is_refused(http: httpx.Client) -> None:
    deep: Any = "x"
    for _ in range(200):
        deep = {"a": deep}
    messages = [{"role": "assistant", "content": "x", "tool_calls": [deep]}]
    refusal(http.post("/v1/chat/completions", json={"messages": messages}))


@pytest.mark.parametrize(("method", "path"), [("GET", "/nowhere"), ("POST", "/v1/embeddings"), ("GET", "/v1/")])
def test_unknown_path_is_404(http: httpx.Client, method: str, path: str) -> None:
    assert refusal(http.request(method, path), 404)[0] == "not_found"


def test_wrong_method_is_405_and_names_the_right_one(http: httpx.Client) -> None:
    response = http.get("/v1/chat/completions")
    assert refusal(response, 405)[0] == "method_not_allowed"
    assert response.headers["allow"] == "POST"
    assert refusal(http.post("/health"), 405)


def test_other_media_types_are_415(http: httpx.Client) -> None:
    response = http.post("/v1/completions", data={"prompt": "a"})
    assert refusal(response, 415)[0] == "unsupported_media_type"


def test_media_type_may_have_a_charset_or_be_absent(http: httpx.Client) -> None:
    for headers in ({"content-type": "application/json; charset=utf-8"}, {}):
        assert http.post("/v1/completions", content=b'{"prompt": "a"}', headers=headers).status_code == 200


def test_request_ids_are_ours_and_a_clients_is_only_echoed(http: httpx.Client, service: FakeService) -> None:
    responses = [http.post("/v1/completions", json=TEXT, headers={"x-request-id": "mine"}) for _ in range(2)]
    ids = [response.headers["x-request-id"] for response in responses]
    assert ids == [response.json()["id"] for response in responses] == [one.request_id for one in service.requests]
    assert len(set(ids)) == 2 and "mine" not in ids
    assert [response.headers["x-client-request-id"] for response in responses] == ["mine", "mine"]


def test_clients_id_cannot_write_headers(server: RunningServer) -> None:
    with connect(server) as sock:
        sock.sendall(post("/v1/completions", b'{"prompt":"a"}', "x-request-id: a\tb\x80" + "c" * 500))
        status, headers, _ = read_response(sock)
    assert status == 200
    assert headers["x-client-request-id"] == "ab" + "c" * 123


def test_invalid_http_gets_an_error_body_and_is_closed(server: RunningServer) -> None:
    with connect(server) as sock:
        sock.sendall(b"NONSENSE\r\n\r\n")
        data = read_all(sock)
    assert data.startswith(b"HTTP/1.1 400 ") and b'"code":"invalid_http"' in data


def test_fault_of_ours_is_a_500_that_shows_nothing(
    http: httpx.Client, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    def boom(*_: Any, **__: Any) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(service, "submit", boom)
    code, _, message = refusal(http.post("/v1/completions", json=TEXT), 500)
    assert code == "internal_error" and "secret" not in message
    assert service.wait_outcomes(1) == [Outcome.ERROR]


def test_official_client_raises_its_own_exceptions(client: openai.OpenAI, service: FakeService) -> None:
    service.refuse = Refused(Outcome.QUEUE_FULL, "full")
    with pytest.raises(openai.RateLimitError) as caught:
        client.completions.create(model="fake-model", prompt="a")
    assert caught.value.code == "queue_full"
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="fake-model", prompt="a", temperature=3)


def test_official_client_retries_what_it_is_told_to(server: RunningServer, service: FakeService) -> None:
    def open_later(stream: Any) -> None:
        stream.fail(Refused(Outcome.QUEUE_FULL, "full", retry_after_s=0.1))
        service.reply, service.on_submit = "ok", None

    service.reply, service.on_submit = None, open_later
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=1) as client:
        assert client.completions.create(model="fake-model", prompt="a").choices[0].text == "ok"


class TestApiKey:
    def test_wrong_or_no_key_is_401_and_the_right_one_passes(self) -> None:
        with serving(api_key="s3cret") as server, httpx.Client(base_url=server.url) as http:
            for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "s3cret"}, {"authorization": ""}):
                response = http.post("/v1/completions", json=TEXT, headers=headers)
                assert refusal(response, 401)[0] == "invalid_api_key"
                assert response.headers["www-authenticate"] == "Bearer"
            with openai.OpenAI(base_url=f"{server.url}/v1", api_key="s3cret") as client:
                assert client.completions.create(model="fake-model", prompt="a").choices
            for path in ("/health", "/health/live", "/health/ready", "/metrics", "/version"):
                assert http.get(path).status_code == 200
            for path in ("/v1/models", "/debug/requests/x"):
                assert http.get(path).status_code == 401


def test_codes_of_invalid_requests_that_the_table_lacks_are_plain_400s() -> None:
    refused = Refused.of(InvalidRequest("m", param="p", code="something"))
    assert (refused.outcome, refused.status, refused.param) == (Outcome.INVALID, 400, "p")
    assert Refused.of(InvalidRequest("m", code="internal_error")).status == 400
