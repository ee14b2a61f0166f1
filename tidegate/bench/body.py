"""RequestBodies: a WorkItem as the JSON of a completion request, in token ids, text or chat messages.

Transcripts hold what a conversation has said so far; its next turn sends all of it again, as chat clients do.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from tidegate.bench.content import text, token_ids
from tidegate.bench.score import Objectives
from tidegate.bench.workload import WorkItem

Transcript = list[dict[str, str]]


class RequestBodies:
    """`objectives`, when given, are sent along as each request's own (`slo`)."""

    def __init__(
        self,
        prompt_format: Literal["tokens", "text", "chat"],
        *,
        model: str = "default",
        objectives: Objectives | None = None,
    ) -> None:
        self._format = prompt_format
        self._model = model
        self._objectives = objectives

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self._format == "chat" else "/v1/completions"

    def first(self, item: WorkItem) -> bytes:
        if self._format == "tokens":
            return self._encode(item, {"prompt": token_ids(item.content)})
        return self.next(item, self.transcript(item))

    def next(self, item: WorkItem, transcript: Transcript) -> bytes:
        """A turn of a conversation whose transcript ends with this turn's question."""
        if self._format == "chat":
            return self._encode(item, {"messages": transcript})
        return self._encode(item, {"prompt": "\n".join(message["content"] for message in transcript)})

    def transcript(self, item: WorkItem) -> Transcript:
        """A first turn's: a shared prefix is the system message."""
        if self._format == "tokens":
            return []
        *system, question = item.content
        opening = [{"role": "system", "content": text(system)}] if system else []
        return [*opening, {"role": "user", "content": text([question])}]

    def answered(self, transcript: Transcript, answer: str, item: WorkItem) -> Transcript:
        """With the answer that came, and the question of the turn that follows."""
        return [
            *transcript,
            {"role": "assistant", "content": answer},
            {"role": "user", "content": text(item.content)},
        ]

    def _encode(self, item: WorkItem, prompt: dict[str, Any]) -> bytes:
        body: dict[str, Any] = {
            "model": self._model,
            **prompt,
            "max_tokens": item.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if item.ignore_eos:
            body["ignore_eos"] = True
        if item.tier:
            body["service_tier"] = item.tier
        if item.session_id:
            body["prompt_cache_key"] = item.session_id
        if self._objectives is not None and (slo := self._slo(item)):
            body["slo"] = slo
        return msgspec.json.encode(body)

    def _slo(self, item: WorkItem) -> dict[str, int]:
        assert self._objectives is not None
        found = (("ttft_ms", self._objectives.ttft_s), ("tpot_ms", self._objectives.tpot_s))
        return {
            name: max(1, round(values[item.length_class] * 1e3))
            for name, values in found
            if item.length_class in values
        }
