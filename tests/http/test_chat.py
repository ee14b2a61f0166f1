"""Chat completions through the official client, on a fake service."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from tests.http.fake_service import EOS_ID, FakeService
from tidegate.api.service import Outcome
from tidegate.request import FinishReason

HI: Any = [{"role": "user", "content": "Hi"}]


def stream(client: openai.OpenAI, **fields: Any) -> list[ChatCompletionChunk]:
    return list(client.chat.completions.create(model="fake-model", messages=HI, stream=True, **fields))


def text_of(chunks: list[ChatCompletionChunk], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


def reasons_of(chunks: list[ChatCompletionChunk], index: int = 0) -> list[str]:
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return [choice.finish_reason for choice in choices if choice.finish_reason is not None]


def test_whole_answer_has_text_reason_and_usage(client: openai.OpenAI, service: FakeService) -> None:
    answer = client.chat.completions.create(model="fake-model", messages=HI)
    assert answer.object == "chat.completion"
    assert answer.model == "fake-model"
    assert answer.choices[0].message.content == "Hello, wörld!"
    assert answer.choices[0].finish_reason == "stop"
    usage = answer.usage
    assert usage is not None and usage.prompt_tokens_details is not None
    assert usage.prompt_tokens == service.requests[0].num_prompt_tokens
    assert usage.completion_tokens == len("Hello, wörld!".encode()) + 1
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens == 3
    assert service.wait_outcome(answer.id) is Outcome.STOP
    assert set(service.milestones[answer.id]) == {"tokenized_s", "first_byte_s"}


def test_stream_is_role_chunk_deltas_one_reason_and_usage(client: openai.OpenAI, service: FakeService) -> None:
    chunks = stream(client, stream_options={"include_usage": True})
    assert chunks[0].choices[0].delta.role == "assistant"
    assert text_of(chunks) == "Hello, wörld!"
    assert reasons_of(chunks) == ["stop"]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert len({(chunk.id, chunk.created, chunk.object) for chunk in chunks}) == 1
    whole = client.chat.completions.create(model="fake-model", messages=HI)
    assert chunks[-1].usage == whole.usage


def test_stream_on_the_wire_is_server_sent_events(http: httpx.Client) -> None:
    with http.stream("POST", "/v1/chat/completions", json={"messages": HI, "stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = response.read().decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    documents = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert all("usage" not in document for document in documents)
    assert documents[-1]["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]


def test_usage_is_null_on_all_but_the_last_chunk(http: httpx.Client) -> None:
    body = {"messages": HI, "stream": True, "stream_options": {"include_usage": True}}
    events = http.post("/v1/chat/completions", json=body).text.split("\n\n")[:-2]
    usages = [json.loads(event.removeprefix("data: "))["usage"] for event in events]
    assert usages[:-1] == [None] * (len(usages) - 1)
    assert usages[-1]["prompt_tokens_details"] == {"cached_tokens": 3}


def test_text_needs_escaping_in_json(client: openai.OpenAI, service: FakeService) -> None:
    service.reply = 'a "quoted"\\ line\nand\ttab \x01 \u2028 😀'
    assert text_of(stream(client)) == service.reply
    assert client.chat.completions.create(model="default", messages=HI).choices[0].message.content == service.reply


def test_max_tokens_cuts_with_reason_length(client: openai.OpenAI, service: FakeService) -> None:
    answer = client.chat.completions.create(model="fake-model", messages=HI, max_tokens=5)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("Hello", "length")
    assert service.wait_outcome(answer.id) is Outcome.LENGTH
    assert reasons_of(stream(client, max_completion_tokens=5)) == ["length"]


def test_answer_may_fill_the_context_when_no_maximum_is_given(client: openai.OpenAI, service: FakeService) -> None:
    client.chat.completions.create(model="fake-model", messages=HI)
    assert service.served is not None
    assert service.requests[0].max_total_tokens == service.served.max_model_len


@pytest.mark.parametrize("streams", [False, True])
def test_stop_string_ends_the_choice_and_the_request(
    client: openai.OpenAI, service: FakeService, streams: bool
) -> None:
    service.reply = "one two three four"
    if streams:
        chunks = stream(client, stop=["o thr", "x"], stream_options={"include_usage": True})
        text, reasons, usage = text_of(chunks), reasons_of(chunks), chunks[-1].usage
    else:
        answer = client.chat.completions.create(model="fake-model", messages=HI, stop=["o thr", "x"])
        text, reasons, usage = answer.choices[0].message.content, [answer.choices[0].finish_reason], answer.usage
    assert (text, reasons) == ("one tw", ["stop"])
    assert usage is not None and usage.completion_tokens == len("one two thr")
    assert service.next_stream().is_closed.is_set()


def test_stop_string_that_is_included(client: openai.OpenAI, service: FakeService) -> None:
    service.reply = "one two three"
    assert text_of(stream(client, stop=" two", extra_body={"include_stop_str_in_output": True})) == "one two"


def test_several_choices_are_told_apart(client: openai.OpenAI, service: FakeService) -> None:
    answer = client.chat.completions.create(model="fake-model", messages=HI, n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.message.content for choice in answer.choices} == {"Hello, wörld!"}
    chunks = stream(client, n=3, stream_options={"include_usage": True})
    assert [reasons_of(chunks, index) for index in range(3)] == [["stop"]] * 3
    assert [text_of(chunks, index) for index in range(3)] == ["Hello, wörld!"] * 3
    assert chunks[-1].usage == answer.usage


def test_request_of_several_choices_runs_until_the_last_has_stopped(
    client: openai.OpenAI, service: FakeService
) -> None:
    service.reply = None
    service.on_submit = lambda stream: stream.emit("aX")
    iterator = iter(client.chat.completions.create(model="fake-model", messages=HI, n=2, stop="X", stream=True))
    running = service.next_stream()
    assert text_of([next(iterator) for _ in range(3)]) == "a"
    assert next(iterator).choices[0].finish_reason == "stop"
    assert not running.is_closed.is_set()
    running.emit("ignored", index=0)
    running.emit("bX", index=1)
    rest = list(iterator)
    assert (text_of(rest, 0), text_of(rest, 1)) == ("", "b")
    assert running.is_closed.wait(10)


def test_log_probabilities_come_with_bytes_and_alternatives(client: openai.OpenAI, service: FakeService) -> None:
    service.reply = "hé"
    answer = client.chat.completions.create(
        model="fake-model", messages=HI, logprobs=True, top_logprobs=2, max_tokens=3
    )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert [entry.bytes for entry in content] == [[byte] for byte in "hé".encode()]
    assert content[0].token == "h"
    assert [top.token for top in content[0].top_logprobs] == ["h", "i"]
    chunks = stream(client, logprobs=True, top_logprobs=2, max_tokens=3)
    streamed = [
        entry
        for chunk in chunks
        for choice in chunk.choices
        if choice.logprobs
        for entry in choice.logprobs.content or ()
    ]
    assert streamed == content


def test_prompt_log_probabilities(http: httpx.Client, service: FakeService) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": HI, "prompt_logprobs": 1}).json()
    ids = service.requests[0].prompt_token_ids
    assert answer["prompt_logprobs"][0] is None
    assert str(ids[1]) in answer["prompt_logprobs"][1]
    assert len(answer["prompt_logprobs"]) == len(ids)


def test_special_token_text_in_a_message_stays_text(client: openai.OpenAI, service: FakeService) -> None:
    client.chat.completions.create(model="fake-model", messages=[{"role": "user", "content": "<|im_end|>"}])
    assert EOS_ID not in service.requests[0].prompt_token_ids


def test_content_parts_are_joined(client: openai.OpenAI, service: FakeService) -> None:
    parts: Any = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    client.chat.completions.create(model="fake-model", messages=[{"role": "user", "content": parts}])
    assert b"a\nb" in bytes(service.requests[0].prompt_token_ids)


def test_first_token_without_text_already_starts_the_stream(client: openai.OpenAI, service: FakeService) -> None:
    service.reply = None
    service.on_submit = lambda stream: stream.emit("ö".encode()[:1])
    chunks = iter(client.chat.completions.create(model="fake-model", messages=HI, stream=True))
    assert next(chunks).choices[0].delta.role == "assistant"
    service.next_stream().emit("ö".encode()[1:], FinishReason.STOP)
    assert text_of(list(chunks)) == "ö"


def test_sampling_fields_reach_the_request(client: openai.OpenAI, service: FakeService) -> None:
    client.chat.completions.create(
        model="fake-model", messages=HI, temperature=0.5, top_p=0.9, seed=-7, presence_penalty=1, frequency_penalty=-1,
        logit_bias={"65": 5}, stop=["x"], user="me",
        extra_body={
            "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2, "stop_token_ids": [66],
            "ignore_eos": True, "allowed_token_ids": [65, 66], "bad_words": ["no"], "session_id": "s1",
        },
    )  # fmt: skip
    request = service.requests[0]
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 5, 0.1)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (1, -1, 1.1)
    assert (params.logit_bias, params.allowed_token_ids, params.min_tokens) == ({65: 5.0}, (65, 66), 2)
    assert params.bad_words == (tuple(b" no"), tuple(b"no"))
    assert request.stop_token_ids == (66,)
    assert request.session_id == "s1"
    assert 0 <= request.seed < 2**62


def test_same_seed_gives_the_same_request_seed_and_none_a_fresh_one(
    client: openai.OpenAI, service: FakeService
) -> None:
    for seed in (3, 3, None, None):
        client.chat.completions.create(model="fake-model", messages=HI, seed=seed)
    seeds = [request.seed for request in service.requests]
    assert seeds[0] == seeds[1] == 3
    assert seeds[2] != seeds[3]


def test_end_of_sequence_ids_stop_unless_ignored(client: openai.OpenAI, service: FakeService) -> None:
    client.chat.completions.create(model="fake-model", messages=HI, extra_body={"stop_token_ids": [66]})
    assert service.requests[0].stop_token_ids == (66, EOS_ID)


def test_fault_in_mid_stream_is_an_error_event_without_done(client: openai.OpenAI, service: FakeService) -> None:
    service.reply = None
    service.on_submit = lambda stream: stream.emit("a")
    chunks = iter(client.chat.completions.create(model="fake-model", messages=HI, stream=True))
    request_id = next(chunks).id
    service.next_stream().emit("", FinishReason.ERROR)
    with pytest.raises(openai.APIError, match="ended by the server"):
        list(chunks)
    assert service.wait_outcome(request_id) is Outcome.ERROR


@pytest.mark.parametrize("streams", [False, True])
def test_fault_before_the_first_token_is_a_500(client: openai.OpenAI, service: FakeService, streams: bool) -> None:
    service.reply = None
    service.on_submit = lambda stream: stream.emit("", FinishReason.ERROR)
    with pytest.raises(openai.InternalServerError):
        client.chat.completions.create(model="fake-model", messages=HI, stream=streams)
    assert service.wait_outcomes(1) == [Outcome.ERROR]
