"""CompletionFormat: the JSON of /v1/completions.

Owns: text chunks, the echo of the prompt, and OpenAI's parallel lists of log-probabilities with their text offsets,
which count characters of the returned text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tidegate.api.choices import Answers, Choice, Delta
from tidegate.api.formats import Envelope, finite, prompt_logprobs_document
from tidegate.api.prompts import Prompt
from tidegate.request import TokenLogprobs
from tidegate.text.detokenizer import IncrementalDetokenizer
from tidegate.text.tokenizer import Tokenizer

_encode = msgspec.json.encode


class CompletionFormat(Envelope):
    """`echoes`: the prompts to be repeated before their answers, or None. `num_choices` is n.

    `drops_output`: only the echo was asked for (max_tokens 0); the one token that was computed is not shown or counted.
    """

    def __init__(
        self,
        *,
        response_id: str,
        model: str,
        tokenizer: Tokenizer,
        with_usage: bool,
        with_logprobs: bool,
        with_prompt_logprobs: bool,
        echoes: Sequence[Prompt] | None,
        num_choices: int,
        drops_output: bool,
    ) -> None:
        super().__init__(
            response_id=response_id,
            model=model,
            tokenizer=tokenizer,
            object_name="text_completion",
            chunk_name="text_completion",
            with_usage=with_usage,
        )
        self._with_logprobs = with_logprobs
        self._with_prompt_logprobs = with_prompt_logprobs
        self._echoes = echoes
        self._num_choices = num_choices
        self._drops_output = drops_output

    def opening(self, answers: Answers) -> bytes:
        """The prompts with their log-probabilities when they are echoed, else nothing."""
        if self._echoes is None:
            return b""
        chunks = []
        for choice in answers.all_choices:
            place = choice.index // self._num_choices
            logprobs = self._logprobs(*self._echo_entries(place, answers)) if self._with_logprobs else None
            chunks.append(self._text_chunk(choice.index, self._echoes[place].text, logprobs, b"null"))
        return b"".join(chunks)

    def chunk(self, choice: Choice, delta: Delta) -> bytes:
        data = b""
        if (delta.text or delta.logprobs) and not self._drops_output:
            logprobs = None
            if self._with_logprobs:
                logprobs = self._logprobs([], [], [])
                self._append(logprobs, delta, self._echo_length(choice.index // self._num_choices))
            data = self._text_chunk(choice.index, delta.text, logprobs, b"null")
        if delta.finish_reason is not None:
            data += self._text_chunk(choice.index, "", None, b'"%b"' % self._finish_reason(choice).encode())
        return data

    def usage(self, answers: Answers) -> dict[str, object]:
        return answers.usage(counts_output=not self._drops_output)

    def whole(self, answers: Answers, deltas: Sequence[Delta]) -> bytes:
        documents = []
        for choice, delta in zip(answers.all_choices, deltas, strict=True):
            place = choice.index // self._num_choices
            text = "" if self._echoes is None else self._echoes[place].text
            logprobs = self._logprobs(*self._echo_entries(place, answers)) if self._with_logprobs else None
            if not self._drops_output:
                if logprobs is not None:
                    self._append(logprobs, delta, len(text))
                text += delta.text
            document = {
                "index": choice.index,
                "text": text,
                "logprobs": logprobs,
                "finish_reason": self._finish_reason(choice),
            }
            if self._with_prompt_logprobs:
                document["prompt_logprobs"] = prompt_logprobs_document(answers.prompt_logprobs[place], self._tokenizer)
            documents.append(document)
        return _encode(self._document(documents, self.usage(answers)))

    def _text_chunk(self, index: int, text: str, logprobs: dict[str, Any] | None, reason: bytes) -> bytes:
        return b'%b%d,"text":%b,"logprobs":%b,"finish_reason":%b%b' % (
            self._head, index, _encode(text), _encode(logprobs), reason, self._tail
        )  # fmt: skip

    def _finish_reason(self, choice: Choice) -> str:
        return "length" if self._drops_output else str(choice.finish_reason)

    def _echo_length(self, place: int) -> int:
        return 0 if self._echoes is None else len(self._echoes[place].text)

    def _echo_entries(
        self, place: int, answers: Answers
    ) -> tuple[Sequence[int], Sequence[TokenLogprobs | None], Sequence[int]]:
        """The echoed prompt's token ids, what is known of each, and the characters before each."""
        if self._echoes is None:
            return [], [], []
        token_ids = self._echoes[place].token_ids
        detokenizer = IncrementalDetokenizer(self._tokenizer, skip_special_tokens=False)
        offsets = []
        offset = 0
        for token_id in token_ids:
            offsets.append(offset)
            offset += len(detokenizer.push((token_id,)))
        return token_ids, answers.prompt_logprobs[place] or [None] * len(token_ids), offsets

    def _logprobs(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None], offsets: Sequence[int]
    ) -> dict[str, Any]:
        return {
            "tokens": [self._name(token_id) for token_id in token_ids],
            "token_logprobs": [None if entry is None else finite(entry.logprob) for entry in entries],
            "top_logprobs": [None if entry is None else self._top(entry) for entry in entries],
            "text_offset": list(offsets),
        }

    def _append(self, logprobs: dict[str, Any], delta: Delta, offset: int) -> None:
        logprobs["tokens"].extend(self._name(entry.token_id) for entry in delta.logprobs)
        logprobs["token_logprobs"].extend(finite(entry.logprob) for entry in delta.logprobs)
        logprobs["top_logprobs"].extend(self._top(entry) for entry in delta.logprobs)
        logprobs["text_offset"].extend(offset + one for one in delta.text_offsets)

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """The most likely tokens, and the one that is there."""
        top = {self._name(token_id): finite(logprob) for token_id, logprob in entry.top}
        top.setdefault(self._name(entry.token_id), finite(entry.logprob))
        return top

    def _name(self, token_id: int) -> str:
        """The token's text; its bytes written out where they are no text, so that names stay distinct."""
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
