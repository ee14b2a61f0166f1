"""ChatFormat: the JSON of /v1/chat/completions.

Owns: the chat envelope's inside (role chunk, deltas, messages, log-probabilities with their bytes).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tidegate.api.choices import Answers, Choice, Delta
from tidegate.api.formats import Envelope, finite, prompt_logprobs_document
from tidegate.text.tokenizer import Tokenizer

_encode = msgspec.json.encode


class ChatFormat(Envelope):
    def __init__(
        self,
        *,
        response_id: str,
        model: str,
        tokenizer: Tokenizer,
        with_usage: bool,
        with_logprobs: bool,
    ) -> None:
        super().__init__(
            response_id=response_id,
            model=model,
            tokenizer=tokenizer,
            object_name="chat.completion",
            chunk_name="chat.completion.chunk",
            with_usage=with_usage,
        )
        self._with_logprobs = with_logprobs

    def opening(self, answers: Answers) -> bytes:
        rest = b',"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null' + self._tail
        return b"".join([b"%b%d%b" % (self._head, choice.index, rest) for choice in answers.all_choices])

    def chunk(self, choice: Choice, delta: Delta) -> bytes:
        data = b""
        if delta.text or delta.logprobs:
            logprobs = _encode(self._logprobs(delta)) if self._with_logprobs else b"null"
            data = b'%b%d,"delta":{"content":%b},"logprobs":%b,"finish_reason":null%b' % (
                self._head, choice.index, _encode(delta.text), logprobs, self._tail
            )  # fmt: skip
        if delta.finish_reason is not None:
            data += b'%b%d,"delta":{},"logprobs":null,"finish_reason":"%b"%b' % (
                self._head, choice.index, delta.finish_reason.encode(), self._tail
            )  # fmt: skip
        return data

    def usage(self, answers: Answers) -> dict[str, object]:
        return answers.usage()

    def whole(self, answers: Answers, deltas: Sequence[Delta]) -> bytes:
        document = self._document(
            [
                {
                    "index": choice.index,
                    "message": {"role": "assistant", "content": delta.text, "refusal": None},
                    "logprobs": self._logprobs(delta) if self._with_logprobs else None,
                    "finish_reason": choice.finish_reason,
                }
                for choice, delta in zip(answers.all_choices, deltas, strict=True)
            ],
            self.usage(answers),
        )
        prompt_logprobs = prompt_logprobs_document(answers.prompt_logprobs[0], self._tokenizer)
        if prompt_logprobs is not None:
            document["prompt_logprobs"] = prompt_logprobs
        return _encode(document)

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        return {
            "content": [
                {
                    **self._token(entry.token_id, entry.logprob),
                    "top_logprobs": [self._token(token_id, logprob) for token_id, logprob in entry.top],
                }
                for entry in delta.logprobs
            ],
            "refusal": None,
        }

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token_id)
        return {"token": data.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(data)}
