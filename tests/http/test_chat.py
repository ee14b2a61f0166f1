"""Chat completions through the official client, on a fake service."""

from __future__ import annotations

import openai

from tests.http.fake_service import FakeService

HI = [{"role": "user", "content": "Hi"}]


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
