"""Which fields and values are accepted, refused or ignored, and how a refusal reads."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from tests.http.fake_service import FakeService
from tidegate.api.service import Outcome

CHAT: dict[str, Any] = {"model": "fake-model", "messages": [{"role": "user", "content": "Hi"}]}
TEXT: dict[str, Any] = {"model": "fake-model", "prompt": "Hi"}


def post(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post("/v1/chat/completions", json={**CHAT, **fields})


def refusal(response: httpx.Response, status: int = 400) -> tuple[str, str | None, str]:
    """Code, param and message of an error in OpenAI's form."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error["code"], error["param"], error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"store": False, "tools": [], "response_format": {"type": "text"}, "metadata": {"a": "b"}, "user": "u"},
        {"store": True, "tool_choice": "auto", "parallel_tool_calls": True, "modalities": ["text"]},
        {"best_of": 1, "suffix": "", "length_penalty": 1.0, "use_beam_search": False, "skip_special_tokens": True},
        {"prediction": {"type": "content", "content": "x"}, "verbosity": "medium", "reasoning_effort": None},
        {"temperature": None, "stop": None, "max_tokens": None, "logit_bias": None, "stream": None, "seed": None},
    ],
)
def test_neutral_values_are_accepted_and_not_named(http: httpx.Client, fields: dict[str, Any]) -> None:
    response = post(http, **fields)
    assert response.status_code == 200, response.text
    assert "x-tidegate-ignored" not in response.headers


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("response_format", {"type": "json_object"}),
        ("modalities", ["text", "audio"]),
        ("best_of", 2),
        ("best_of", True),
        ("suffix", "end"),
        ("use_beam_search", True),
        ("guided_regex", "[a-z]+"),
        ("reasoning_effort", "high"),
        ("skip_special_tokens", False),
        ("web_search_options", {}),
    ],
)
def test_values_that_would_change_the_output_are_refused(
    http: httpx.Client, service: FakeService, name: str, value: Any
) -> None:
    code, param, message = refusal(post(http, **{name: value}))
    assert (code, param) == ("unsupported_parameter", name)
    assert "would change the output" in message
    assert not service.requests


@pytest.mark.parametrize(
    ("name", "value", "advice"),
    [
        ("tools", [{}], "leave it out"),
        ("use_beam_search", True, "leave it out or send false"),
        ("skip_special_tokens", False, "leave it out or send true"),
        ("response_format", {"type": "json_object"}, 'leave it out or send {"type":"text"}'),
    ],
)
def test_refused_value_is_told_the_one_that_is_accepted(http: httpx.Client, name: str, value: Any, advice: str) -> None:
    assert refusal(post(http, **{name: value}))[2].endswith(f"; {advice}")


def test_unknown_fields_are_ignored_and_named(http: httpx.Client) -> None:
    response = post(http, frobnicate=1, wibble={"a": 1}, **{"bad\nname": 1})
    assert response.status_code == 200
    assert response.headers["x-tidegate-ignored"] == "frobnicate, wibble"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 5}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"seed": 2**64}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "logprobs"),
        ({"logprobs": 5}, "logprobs"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 10_000}, "stop"),
        ({"stop": "x" * 100_000}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop_token_ids": [258]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"logit_bias": {"999": 1}}, "logit_bias"),
        ({"logit_bias": {"65": 101}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(5000)}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [10**20]}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": ["x"] * 1000}, "bad_words"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"min_tokens": 100_000}, "min_tokens"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": "yes"}, "stream"),
        ({"service_tier": "gold"}, "service_tier"),
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": ["Hi"]}, "messages[0]"),
        ({"messages": [{"role": "wizard", "content": "Hi"}]}, "messages[0].role"),
        ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": None}, "messages"),
    ],
)
def test_wrong_values_name_their_field(
    http: httpx.Client, service: FakeService, fields: dict[str, Any], param: str
) -> None:
    code, named, _ = refusal(post(http, **fields))
    assert named == param
    assert code in ("invalid_request", "context_length_exceeded")
    assert not service.requests
    assert service.wait_outcomes(1) in ([Outcome.INVALID], [Outcome.CONTEXT_LENGTH])


@pytest.mark.parametrize(
    "prompt", ["", [], [[]], [""], ["a", 5], [5, "a"], [258], [-1], [[65], [9999]], [1.5], None, 5, {}, [[65], "a", 3],
               ["a"] * 257, [True, False]]
)  # fmt: skip
def test_wrong_prompts_are_refused(http: httpx.Client, service: FakeService, prompt: Any) -> None:
    refusal(http.post("/v1/completions", json={"prompt": prompt}))
    assert not service.requests


def test_wrong_type_says_what_was_expected(http: httpx.Client) -> None:
    assert refusal(post(http, max_tokens="5"))[2] == "invalid value for 'max_tokens': expected int, got str"


def test_missing_field_is_named(http: httpx.Client) -> None:
    assert refusal(http.post("/v1/completions", json={}))[1:] == ("prompt", "missing required field 'prompt'")


def test_prompt_that_fits_exactly_runs_and_one_token_more_is_refused_with_its_numbers(
    http: httpx.Client, service: FakeService
) -> None:
    fits = {"prompt": [65] * 4090, "max_tokens": 6}
    assert http.post("/v1/completions", json=fits).status_code == 200
    code, _, message = refusal(http.post("/v1/completions", json={**fits, "max_tokens": 7}))
    assert code == "context_length_exceeded"
    assert "4096" in message and "4097" in message and "4090 in the prompt" in message
    assert len(service.requests) == 1


@pytest.mark.parametrize("num_tokens", [4096, 4097, 10_000])
def test_prompt_without_room_for_a_token_is_refused(http: httpx.Client, num_tokens: int) -> None:
    assert refusal(http.post("/v1/completions", json={"prompt": [65] * num_tokens}))[0] == "context_length_exceeded"


def test_prompt_that_its_bytes_rule_out_is_refused_before_it_is_tokenized(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch, service: FakeService
) -> None:
    assert service.served is not None
    monkeypatch.setattr(service.served.tokenizer, "encode", lambda *_, **__: pytest.fail("tokenized"))
    longest = 12  # bytes of a token: "<|im_start|>"
    response = http.post("/v1/completions", json={"prompt": "a" * (longest * 4096)})
    assert refusal(response)[0] == "context_length_exceeded"
    assert not service.least_requests  # its length is no matter of the load


def test_model_that_is_not_served_is_404(client: openai.OpenAI, http: httpx.Client) -> None:
    assert refusal(post(http, model="gpt-4"), 404)[:2] == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_service_tier_that_was_served_is_told(http: httpx.Client) -> None:
    assert post(http).json()["service_tier"] == "default"
    assert post(http, service_tier="auto").json()["service_tier"] == "default"
