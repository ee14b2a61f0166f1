"""From a request body to Requests: the prompt's tokens, the resolved limits, and every refusal the prompt can earn.

Owns: rendering and tokenizing off the event loop (short prompts on it: a thread costs more than they do), and the check
of everything that depends on the model: lengths, token ids, the model's name.
Invariant: a prompt that its byte length alone rules out is refused before it is tokenized.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from tidegate.api.exchange import Exchange
from tidegate.api.promises import Promises
from tidegate.api.schemas import (
    DEFAULT_COMPLETION_TOKENS,
    ChatBody,
    CompletionBody,
    SamplingFields,
    TokenizeBody,
)
from tidegate.api.service import ServedModel
from tidegate.request import InvalidRequest, Request, SamplingParams
from tidegate.tenancy.tenants import Tenant
from tidegate.text.conversation import ConversationMemory, ConversationStart

MAX_PROMPTS = 256
MAX_BAD_WORDS = 128
MAX_BAD_WORD_LENGTH = 256
SHORT_PROMPT_BYTES = 2048
"""Up to here a prompt is tokenized on the event loop (1-2 ms at most)."""
_SEED_MASK = 2**62 - 1
"""Seeds are folded to 62 bits, so that seed + n never leaves 64."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Prompt:
    """`text` is the client's own text, empty when it sent token ids. `conversation` is what a chat is remembered by."""

    token_ids: list[int]
    text: str = ""
    conversation: ConversationStart | None = None


class Prompts:
    """For one served model. Methods are called on the event loop; `pool` runs what takes long."""

    def __init__(self, model: ServedModel, pool: ThreadPoolExecutor) -> None:
        self._model = model
        self._tokenizer = model.tokenizer
        self._pool = pool
        self._conversations = ConversationMemory(model.tokenizer)
        token_bytes = model.tokenizer.token_bytes
        self._max_token_bytes = max((len(token_bytes(i)) for i in range(model.tokenizer.vocab_size)), default=1) or 1

    @property
    def model(self) -> ServedModel:
        return self._model

    def check_model(self, name: str | None) -> None:
        """Raises InvalidRequest for a model that is not served. No name means the one there is."""
        if name is not None and name != self._model.name and name not in self._model.aliases:
            raise InvalidRequest(
                f"the model '{name[:200]}' is not served here; this is '{self._model.name}'",
                param="model",
                code="model_not_found",
            )

    async def of_chat(self, body: ChatBody | TokenizeBody, tenant: Tenant) -> Prompt:
        """Raises InvalidRequest. The template is rendered where the prompt is tokenized."""
        messages = body.messages or []
        num_bytes = _content_bytes(messages)
        self._check_num_bytes(num_bytes, "messages")
        continues = bool(body.continue_final_message)
        begins = not continues if body.add_generation_prompt is None else body.add_generation_prompt

        def encode() -> ConversationStart:
            segments = self._model.chat_template.render(
                messages,
                add_generation_prompt=begins,
                continue_final_message=continues,
                variables=body.chat_template_kwargs,
            )
            return self._conversations.encode(segments, self._namespace(tenant))

        start = await self._run(encode, num_bytes)
        return Prompt(start.token_ids, conversation=start)

    def remember(self, start: ConversationStart, text: str, token_ids: Sequence[int]) -> None:
        """An answer has ended: the next turn of its conversation begins with these very tokens."""
        self._conversations.remember(start, text, token_ids)

    async def of_text(self, text: str, *, add_special_tokens: bool = True, param: str = "prompt") -> Prompt:
        num_bytes = _num_bytes(text)
        self._check_num_bytes(num_bytes, param)
        token_ids = await self._run(
            lambda: self._tokenizer.encode(text, add_special_tokens=add_special_tokens, param=param), num_bytes
        )
        return Prompt(token_ids, text)

    async def of_completion(self, body: CompletionBody) -> list[Prompt]:
        """A string, a list of strings, a list of token ids or a list of those. Raises InvalidRequest."""
        prompt = body.prompt
        if isinstance(prompt, str):
            return [await self.of_text(prompt)]
        if not prompt:
            raise InvalidRequest("prompt must not be empty", param="prompt")
        if all(isinstance(part, int) for part in prompt):
            return [self._of_token_ids([part for part in prompt if isinstance(part, int)])]
        if len(prompt) > MAX_PROMPTS:
            raise InvalidRequest(f"at most {MAX_PROMPTS} prompts a request, not {len(prompt)}", param="prompt")
        prompts = []
        for part in prompt:
            if isinstance(part, int):
                raise InvalidRequest("prompt must not mix token ids with strings or lists", param="prompt")
            prompts.append(await self.of_text(part) if isinstance(part, str) else self._of_token_ids(part))
        return prompts

    def with_text(self, prompt: Prompt) -> Prompt:
        """The prompt with the text that an echo repeats."""
        if prompt.text:
            return prompt
        return Prompt(prompt.token_ids, self._tokenizer.decode(prompt.token_ids, skip_special_tokens=False))

    async def decode(self, token_ids: list[int]) -> str:
        self.check_token_ids(token_ids, "tokens")
        return await self._run(lambda: self._tokenizer.decode(token_ids, skip_special_tokens=False), len(token_ids))

    def check_token_ids(self, token_ids: Sequence[int], param: str) -> None:
        """Raises InvalidRequest for an id outside the vocabulary."""
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self._model.vocab_size):
            worst = min(token_ids) if min(token_ids) < 0 else max(token_ids)
            raise InvalidRequest(
                f"token id {worst} in {param} is outside the vocabulary of {self._model.vocab_size}", param=param
            )

    def bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word's tokens, at the start of a text and after a space. Raises InvalidRequest."""
        if len(words) > MAX_BAD_WORDS or any(len(word) > MAX_BAD_WORD_LENGTH for word in words):
            raise InvalidRequest(
                f"bad_words may hold at most {MAX_BAD_WORDS} words of {MAX_BAD_WORD_LENGTH} characters",
                param="bad_words",
            )
        if not all(words):
            raise InvalidRequest("bad_words must not hold an empty word", param="bad_words")
        spellings = {spelling for word in words for spelling in (word, " " + word.lstrip())}
        encode = self._tokenizer.encode
        return tuple(
            tuple(encode(spelling, add_special_tokens=False, param="bad_words")) for spelling in sorted(spellings)
        )

    def requests(
        self,
        body: SamplingFields,
        params: SamplingParams,
        prompts: Sequence[Prompt],
        *,
        promised: Promises,
        tenant: Tenant,
        request_id: str,
        arrival_s: float,
    ) -> list[Request]:
        """One Request a prompt. Several get numbered ids. Raises InvalidRequest for what cannot fit the model."""
        self.check_token_ids(params.stop_token_ids, "stop_token_ids")
        self.check_token_ids(params.allowed_token_ids or (), "allowed_token_ids")
        self.check_token_ids(tuple(params.logit_bias or ()), "logit_bias")
        stop_token_ids = params.stop_token_ids
        if not params.ignore_eos:
            stop_token_ids = tuple(dict.fromkeys((*stop_token_ids, *self._model.eos_token_ids)))
        default = None if isinstance(body, ChatBody) else DEFAULT_COMPLETION_TOKENS
        seed = random.getrandbits(62) if params.seed is None else params.seed & _SEED_MASK
        return [
            Request(
                request_id=request_id if len(prompts) == 1 else f"{request_id}-{place}",
                prompt_token_ids=prompt.token_ids,
                params=params,
                max_tokens=self._max_tokens(len(prompt.token_ids), params, default),
                seed=seed,
                arrival_s=arrival_s,
                stop_token_ids=stop_token_ids,
                namespace=self._namespace(tenant),
                tenant=tenant.name,
                tier=promised.tier,
                ttft_slo_s=promised.ttft_slo_s,
                tpot_slo_s=promised.tpot_slo_s,
                session_id=body.session_id or body.prompt_cache_key or "",
            )
            for place, prompt in enumerate(prompts)
        ]

    def least_request(
        self, body: ChatBody | CompletionBody, params: SamplingParams, promised: Promises, exchange: Exchange
    ) -> Request | None:
        """A Request with as few tokens as the body's longest prompt can possibly have, to ask whether it is worth
        tokenizing. None where tokenizing costs no more than asking. Raises InvalidRequest for one that cannot fit."""
        num_bytes = _longest_prompt_bytes(body)
        if num_bytes <= SHORT_PROMPT_BYTES:
            return None
        self._check_num_bytes(num_bytes, "messages" if isinstance(body, ChatBody) else "prompt")
        return Request(
            request_id=exchange.request_id,
            prompt_token_ids=[0] * max(1, self._least_tokens(num_bytes)),
            params=params,
            max_tokens=params.max_tokens or 1,
            seed=0,
            arrival_s=exchange.arrival_s,
            tenant=exchange.tenant.name,
            tier=promised.tier,
            ttft_slo_s=promised.ttft_slo_s,
            tpot_slo_s=promised.tpot_slo_s,
        )

    def _namespace(self, tenant: Tenant) -> str:
        return f"{self._model.namespace}\x1f{tenant.namespace}" if tenant.namespace else self._model.namespace

    def _max_tokens(self, num_prompt_tokens: int, params: SamplingParams, default: int | None) -> int:
        longest = self._model.max_model_len
        room = longest - num_prompt_tokens
        if num_prompt_tokens < 1:
            raise InvalidRequest("the prompt is empty", param="prompt")
        wanted = params.max_tokens
        if room < 1 or (wanted is not None and wanted > room):
            num_wanted = wanted or 1
            raise InvalidRequest(
                f"This model's maximum context length is {longest} tokens. However, you requested "
                f"{num_prompt_tokens + num_wanted} tokens ({num_prompt_tokens} in the prompt, {num_wanted} in the "
                "completion). Please reduce the length of the prompt or completion.",
                param="max_tokens" if room >= 1 else None,
                code="context_length_exceeded",
            )
        resolved = wanted or min(room, default or room)
        if params.min_tokens > resolved:
            raise InvalidRequest(
                f"min_tokens ({params.min_tokens}) is above the {resolved} tokens that fit", param="min_tokens"
            )
        return resolved

    def _of_token_ids(self, token_ids: list[int]) -> Prompt:
        if len(token_ids) < self._model.max_model_len:
            self.check_token_ids(token_ids, "prompt")
        return Prompt(token_ids)

    def _check_num_bytes(self, num_bytes: int, param: str) -> None:
        at_least = self._least_tokens(num_bytes)
        if at_least >= self._model.max_model_len:
            raise InvalidRequest(
                f"This model's maximum context length is {self._model.max_model_len} tokens. However, your prompt of "
                f"{num_bytes} bytes has at least {at_least}. Please reduce its length.",
                param=param,
                code="context_length_exceeded",
            )

    def _least_tokens(self, num_bytes: int) -> int:
        """A token stands for at most max_token_bytes bytes, so that many bytes are at least so many tokens."""
        return -(-num_bytes // self._max_token_bytes)

    async def _run(self, work: Callable[[], Result], size: int) -> Result:
        if size <= SHORT_PROMPT_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _longest_prompt_bytes(body: ChatBody | CompletionBody) -> int:
    if isinstance(body, ChatBody):
        return _content_bytes(body.messages)
    prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    return max((_num_bytes(prompt) for prompt in prompts if isinstance(prompt, str)), default=0)


def _content_bytes(messages: Sequence[Mapping[str, Any]]) -> int:
    """Bytes of all text in messages that have not been checked yet."""
    num_bytes = 0
    for message in messages:
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"text": content}]
        texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
        num_bytes += sum(_num_bytes(text) for text in texts if isinstance(text, str))
    return num_bytes
