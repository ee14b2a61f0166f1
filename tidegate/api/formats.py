"""AnswerFormat: the JSON of answers, whole and streamed, as OpenAI writes it; and the Envelope that its kinds share.

Owns: every byte of a 200 response. A stream's chunks are cut from templates that are serialised once a response; per
token only the text is escaped.
Never does: decide what belongs to an answer (choices.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from tidegate.api.choices import Answers, Choice, Delta
from tidegate.request import TokenLogprobs
from tidegate.text.tokenizer import Tokenizer

_encode = msgspec.json.encode
DONE = b"data: [DONE]\n\n"
LEAST_LOGPROB = -9999.0


class AnswerFormat(Protocol):
    def serve_in(self, service_tier: str) -> None:
        """The tier that the answer is served in. Before anything is written."""
        ...

    def opening(self, answers: Answers) -> bytes:
        """The chunks before the first token."""
        ...

    def chunk(self, choice: Choice, delta: Delta) -> bytes:
        """The chunks of one delta: none, its text, its end, or both."""
        ...

    def usage_chunk(self, usage: dict[str, object]) -> bytes: ...

    def usage(self, answers: Answers) -> dict[str, object]: ...

    def whole(self, answers: Answers, deltas: Sequence[Delta]) -> bytes:
        """The response that is not streamed; `deltas` holds the sum of each choice's."""
        ...


class Envelope:
    """What /chat/completions and /completions share: the outside of the response and of its chunks."""

    def __init__(
        self,
        *,
        response_id: str,
        model: str,
        tokenizer: Tokenizer,
        object_name: str,
        chunk_name: str,
        with_usage: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._envelope: dict[str, Any] = {
            "id": response_id, "object": object_name, "created": int(time.time()), "model": model
        }  # fmt: skip
        self._chunk_name = chunk_name
        self._tail = b'}],"usage":null}\n\n' if with_usage else b"}]}\n\n"
        self._head = self._usage_head = b""
        self.serve_in("default")

    def serve_in(self, service_tier: str) -> None:
        """The tier that the answer is served in, for all that is written from now on."""
        self._envelope["service_tier"] = service_tier
        head = _encode({**self._envelope, "object": self._chunk_name})[:-1]
        self._head = b"data: " + head + b',"choices":[{"index":'
        self._usage_head = b"data: " + head + b',"choices":[],"usage":'

    def usage_chunk(self, usage: dict[str, object]) -> bytes:
        return self._usage_head + _encode(usage) + b"}\n\n"

    def _document(self, choices: list[dict[str, Any]], usage: dict[str, object]) -> dict[str, Any]:
        return {**self._envelope, "choices": choices, "usage": usage}


def finite(logprob: float) -> float:
    """JSON has no infinities; OpenAI writes -9999.0 for a token that could not have been drawn."""
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB


def prompt_logprobs_document(
    entries: Sequence[TokenLogprobs | None] | None, tokenizer: Tokenizer
) -> list[dict[str, Any] | None] | None:
    """Position by position, token id -> what is known of it; None where nothing came before."""
    if entries is None:
        return None
    return [
        None
        if entry is None
        else {
            str(token_id): {"logprob": finite(logprob), "decoded_token": tokenizer.token_text(token_id)}
            for token_id, logprob in ((entry.token_id, entry.logprob), *entry.top)
        }
        for entry in entries
    ]
