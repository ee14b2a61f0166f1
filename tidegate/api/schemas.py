"""The bodies that clients send, as structs; field names and meanings are OpenAI's and those of vLLM's extensions.

Owns: one struct per endpoint, and the conversion of its sampling fields to SamplingParams.
Never does: decoding (body.py), defaults that depend on the model (prompts.py), or range checks that SamplingParams has.
None always means "not given", so that an explicit null is accepted everywhere, as OpenAI does.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tidegate.request import InvalidRequest, SamplingParams
from tidegate.text.stop_strings import check_stop_strings

MAX_LOGIT_BIAS = 1024
DEFAULT_COMPLETION_TOKENS = 16
"""What OpenAI's /v1/completions produces when max_tokens is not given."""


class Slo(msgspec.Struct, forbid_unknown_fields=True):
    """Objectives of one request, in milliseconds."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """The fields that chat and completions share."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    service_tier: str | None = None
    slo: Slo | None = None
    timeout_s: float | None = None
    prompt_cache_key: str | None = None
    session_id: str | None = None

    def stop_strings(self) -> tuple[str, ...]:
        """Raises InvalidRequest when there are too many of them."""
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        check_stop_strings(stops)
        return stops

    def sampling_params(
        self, *, max_tokens: int | None, logprobs: int | None, bad_words: tuple[tuple[int, ...], ...]
    ) -> SamplingParams:
        """Raises InvalidRequest. `bad_words` is the field's tokenized form."""
        if self.logit_bias is not None and len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequest(
                f"logit_bias may hold at most {MAX_LOGIT_BIAS} tokens, not {len(self.logit_bias)}", param="logit_bias"
            )
        given: dict[str, Any] = {name: value for name in _PLAIN_FIELDS if (value := getattr(self, name)) is not None}
        if self.allowed_token_ids is not None:
            given["allowed_token_ids"] = tuple(self.allowed_token_ids)
        return SamplingParams(
            max_tokens=max_tokens,
            logprobs=logprobs,
            bad_words=bad_words,
            stop=self.stop_strings(),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            **given,
        )


_PLAIN_FIELDS = (
    "min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "seed", "n", "ignore_eos", "include_stop_str_in_output", "prompt_logprobs",
)  # fmt: skip


class ChatBody(SamplingFields, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionBody(SamplingFields, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None
