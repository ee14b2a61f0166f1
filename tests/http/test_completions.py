"""Text completions through the official client, on a fake service."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from tests.http.fake_service import FakeService


def test_string_prompt(client: openai.OpenAI, service: FakeService) -> None:
    answer = client.completions.create(model="fake-model", prompt="ab", max_tokens=5)
    assert (answer.object, answer.choices[0].text, answer.choices[0].finish_reason) == (
        "text_completion", "Hello", "length"
    )  # fmt: skip
    assert service.requests[0].prompt_token_ids == list(b"ab")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 5)


def test_default_length_is_that_of_openai_and_shrinks_to_what_fits(client: openai.OpenAI, service: FakeService) -> None:
    client.completions.create(model="fake-model", prompt="ab")
    client.completions.create(model="fake-model", prompt=[65] * 4090)
    assert [request.max_tokens for request in service.requests] == [16, 6]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ([65, 66], [[65, 66]]),
        ([[65], [66, 67]], [[65], [66, 67]]),
        (["a", "bc"], [[97], [98, 99]]),
        (" ", [[32]]),
    ],
)
def test_kinds_of_prompt(client: openai.OpenAI, service: FakeService, prompt: Any, expected: list[list[int]]) -> None:
    answer = client.completions.create(model="fake-model", prompt=prompt, max_tokens=2)
    assert [request.prompt_token_ids for request in service.requests] == expected
    assert [choice.index for choice in answer.choices] == list(range(len(expected)))


def test_several_prompts_with_several_choices_are_numbered_in_order(
    client: openai.OpenAI, service: FakeService
) -> None:
    answer = client.completions.create(model="fake-model", prompt=["a", "bb"], n=2, max_tokens=5)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 20)
    assert answer.usage.prompt_tokens_details.cached_tokens == 6
    assert [request.request_id for request in service.requests] == [f"{answer.id}-0", f"{answer.id}-1"]
    chunks = list(client.completions.create(model="fake-model", prompt=["a", "bb"], n=2, max_tokens=5, stream=True))
    reasons = [
        (choice.index, choice.finish_reason) for chunk in chunks for choice in chunk.choices if choice.finish_reason
    ]
    assert sorted(reasons) == [(index, "length") for index in range(4)]
    texts = {index: "" for index in range(4)}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert set(texts.values()) == {"Hello"}


@pytest.mark.parametrize("prompt", ["ab ", [97, 98, 32]])
def test_echo_repeats_the_prompt_streamed_or_not(client: openai.OpenAI, prompt: Any) -> None:
    answer = client.completions.create(model="fake-model", prompt=prompt, echo=True, max_tokens=5)
    assert answer.choices[0].text == "ab Hello"
    chunks = client.completions.create(model="fake-model", prompt=prompt, echo=True, max_tokens=5, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "ab Hello"


def test_log_probabilities_are_parallel_lists(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake-model", prompt="ab", logprobs=2, max_tokens=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["H", "e", "l"]
    assert logprobs.token_logprobs == [-0.5] * 3
    assert logprobs.text_offset == [0, 1, 2]
    assert logprobs.top_logprobs is not None and logprobs.top_logprobs[0] == {"H": -0.5, "I": -1.5}


def test_log_probabilities_cover_an_echoed_prompt(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake-model", prompt="ab", echo=True, logprobs=1, max_tokens=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.text_offset is not None
    assert logprobs.tokens == ["a", "b", "H", "e"]
    assert logprobs.token_logprobs == [None, -0.5, -0.5, -0.5]
    assert [answer.choices[0].text[offset] for offset in logprobs.text_offset] == logprobs.tokens
    chunks = list(
        client.completions.create(model="fake-model", prompt="ab", echo=True, logprobs=1, max_tokens=2, stream=True)
    )
    streamed = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs is not None]
    assert [token for one in streamed for token in one.tokens or ()] == logprobs.tokens
    assert [offset for one in streamed for offset in one.text_offset or ()] == logprobs.text_offset


def test_bytes_that_are_no_text_have_distinct_names(client: openai.OpenAI, service: FakeService) -> None:
    service.reply = "é"
    answer = client.completions.create(model="fake-model", prompt="ab", logprobs=1, max_tokens=2)
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens == ["bytes:\\xc3", "bytes:\\xa9"]


def test_only_the_echo_is_scored_with_max_tokens_0(client: openai.OpenAI, service: FakeService) -> None:
    answer = client.completions.create(model="fake-model", prompt="ab", echo=True, logprobs=1, max_tokens=0)
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason) == ("ab", "length")
    assert choice.logprobs is not None and choice.logprobs.tokens == ["a", "b"]
    assert answer.usage is not None and answer.usage.completion_tokens == 0
    assert service.requests[0].max_tokens == 1


def test_prompt_log_probabilities_come_per_choice(http: httpx.Client) -> None:
    body = {"prompt": ["ab", "cde"], "prompt_logprobs": 0, "max_tokens": 1}
    choices = http.post("/v1/completions", json=body).json()["choices"]
    assert [len(choice["prompt_logprobs"]) for choice in choices] == [2, 3]
