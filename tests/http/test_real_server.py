"""The official client against `tidegate serve` as users start it: default model, real executor, separate processes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types import CompletionUsage
from openai.types.chat import ChatCompletionMessageParam

from tests.worker.served import ServedProcess
from tidegate.models.source import ModelSource

QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def served(default_model: ModelSource, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedProcess]:
    """Exact mode, so that what is asked twice is answered the same."""
    arguments = ("--kv-memory", "256MiB", "--kv-cache-dtype", "f32", "--num-threads", "2")
    # What is tested is the text; on a busy machine f32 would miss the default objectives.
    arguments = (*arguments, "--admission", "off")
    one = ServedProcess(*arguments, tmp=tmp_path_factory.mktemp("serve"))
    try:
        one.wait_ready()
        yield one
        one.process.send_signal(signal.SIGTERM)
        assert one.wait() == 0, one.err
    finally:
        one.close()


@pytest.fixture(scope="module")
def client(served: ServedProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60) as one:
        yield one


def test_the_banner_names_the_precision_that_is_really_served(served: ServedProcess) -> None:
    assert "weights Q4_1, KV f32, compute f32" in "\n".join(served.out)


def test_the_model_is_listed_with_what_the_kv_memory_holds(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "smollm2-135m"
    assert 0 < model.model_dump()["max_model_len"] <= 256 * 2**20 // 46_080


def test_a_chat_is_answered_sensibly_whole_and_streamed_alike(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="default", messages=QUESTION, max_tokens=30, temperature=0)
    choice = whole.choices[0]
    assert "Paris" in (choice.message.content or "")
    assert choice.finish_reason == "stop"
    chunks = list(
        client.chat.completions.create(
            model="smollm2-135m",
            messages=QUESTION,
            max_tokens=30,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == choice.message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert whole.usage is not None
    usage = chunks[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)


def test_the_same_prompt_again_is_served_from_the_cache(client: openai.OpenAI) -> None:
    prompt = "A long story about the sea. " * 20
    answers = [client.completions.create(model="default", prompt=prompt, max_tokens=8, temperature=0) for _ in range(2)]
    cached = [
        answer.usage.prompt_tokens_details.cached_tokens
        for answer in answers
        if answer.usage is not None and answer.usage.prompt_tokens_details is not None
    ]
    assert cached[0] == 0
    assert cached[1] is not None and cached[1] >= 64
    assert answers[0].choices[0].text == answers[1].choices[0].text


def test_eight_at_once_are_each_answered_as_if_alone(client: openai.OpenAI) -> None:
    prompts = [f"{number} plus {number} is" for number in range(8)]
    together = client.completions.create(model="default", prompt=prompts, max_tokens=12, temperature=0)
    for place in (0, 5):
        alone = client.completions.create(model="default", prompt=prompts[place], max_tokens=12, temperature=0)
        assert together.choices[place].text == alone.choices[0].text
    assert [choice.index for choice in together.choices] == list(range(8))


def test_a_stop_string_is_not_sent_and_ends_the_work(client: openai.OpenAI, served: ServedProcess) -> None:
    answer = client.completions.create(
        model="default", prompt="One, two, three, four, five, six,", max_tokens=200, temperature=0, stop=[","]
    )
    assert answer.choices[0].finish_reason == "stop"
    assert "," not in answer.choices[0].text
    released = 'tidegate_kv_blocks{state="held"} 0.0'
    served.until(lambda: released in httpx.get(f"{served.url}/metrics").text)


def test_a_mistake_is_a_400_that_names_the_field(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="default", prompt="x", max_tokens=100_000)
    assert caught.value.code == "context_length_exceeded"


def test_a_requests_timeline_can_be_asked_for(client: openai.OpenAI, served: ServedProcess) -> None:
    answer = client.completions.with_raw_response.create(model="default", prompt="The sea", max_tokens=4)
    request_id = answer.headers["x-request-id"]
    timeline = httpx.get(f"{served.url}/debug/requests/{request_id}").json()
    assert sum(timeline["ttft_parts_s"].values()) == pytest.approx(timeline["ttft_s"], abs=1e-3)


def _answer(client: openai.OpenAI, streams: bool, **asked: Any) -> tuple[str, CompletionUsage]:
    if not streams:
        whole = client.chat.completions.create(model="default", **asked)
        return whole.choices[0].message.content, whole.usage
    chunks = list(
        client.chat.completions.create(model="default", stream=True, stream_options={"include_usage": True}, **asked)
    )
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices), chunks[-1].usage


@pytest.mark.parametrize("streams", [False, True])
def test_each_turn_of_a_chat_hits_what_was_said_before_however_oddly_it_was_tokenized(
    client: openai.OpenAI, streams: bool
) -> None:
    """At this temperature few answers tokenize to the ids that were drawn; one turn is cut by a stop string."""
    messages: list[ChatCompletionMessageParam] = []
    num_before = 0
    for turn in range(6):
        messages.append({"role": "user", "content": f"Question {turn}: name odd words \u6f22\u5b57 \U0001f600."})
        asked = {"messages": messages, "max_tokens": 60, "temperature": 1.5, "seed": turn}
        text, usage = _answer(client, streams, **asked, stop=["e s"] if turn == 3 else None)
        assert usage.prompt_tokens_details is not None
        assert (usage.prompt_tokens_details.cached_tokens or 0) >= 0.9 * num_before
        num_before = usage.prompt_tokens + usage.completion_tokens
        messages.append({"role": "assistant", "content": text})
