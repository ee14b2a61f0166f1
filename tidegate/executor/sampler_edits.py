"""What a request changes in its logits before a token is drawn: penalties, bias, allowed, banned and bad words.

Owns: LogitEdits. Never does: filters that depend on the other logits (top_k, top_p, min_p), nor any drawing.

Order: repetition penalty (tokens of prompt and output), frequency and presence penalty (tokens of the output), then
logit_bias, so that -100 and 100 ban and force whatever the penalties say; then the masks. Token ids outside the
vocabulary are ignored: they were refused earlier, and must not end a step here.

When the masks leave nothing, allowed_token_ids stands and the bans give way (a request that allows only tokens that it
also bans contradicts itself, and must not end in an error after it was accepted): the most likely allowed token it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from tidegate.executor.sampler_groups import FloatRow, Ids
from tidegate.request import SamplingParams
from tidegate.scheduler.step import SampleSpec

_LARGEST = float(np.finfo(np.float32).max)


class LogitEdits:
    """Applies one request's edits to a copy of its row. One row is edited at a time: the copy is reused."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._row = np.empty(vocab_size, dtype=np.float32)
        # Arrays made of a request's tuples and lists, kept from step to step while the request runs. Keyed by
        # identity; the object is held beside its arrays, so that no other one can take its id.
        self._kept: dict[tuple[int, str], tuple[object, Any]] = {}
        self._used: dict[tuple[int, str], tuple[object, Any]] = {}

    def needed(self, spec: SampleSpec) -> bool:
        params = spec.params
        return bool(
            spec.banned_token_ids or params.logit_bias or params.allowed_token_ids is not None or params.needs_history
        )

    def apply(self, row: FloatRow, spec: SampleSpec) -> FloatRow:
        """The row as this request wants it, in a buffer that the next call overwrites. NaN stays NaN."""
        params = spec.params
        edited = self._row
        np.copyto(edited, row)
        self._penalise(row, edited, spec)
        if params.logit_bias:
            token_ids, biases = self._keep(params, "bias", lambda: self._bias_arrays(params))
            edited[token_ids] += biases
        if params.allowed_token_ids is not None:
            allowed_ids = self._allowed_ids(params)
            if allowed_ids.size:
                values = edited[allowed_ids]
                edited.fill(-np.inf)
                edited[allowed_ids] = values
        banned_ids = _bad_word_ends(params, spec.recent_token_ids or [])
        banned_ids.extend(spec.banned_token_ids)
        if banned_ids:
            edited[self._in_vocab(banned_ids)] = -np.inf
        return edited

    def fallback(self, row: FloatRow, params: SamplingParams) -> int:
        """The token when the masks left none: the most likely allowed one, the lowest id among equals."""
        if params.allowed_token_ids is not None:
            allowed_ids = self._allowed_ids(params)
            if allowed_ids.size:
                return int(allowed_ids[row[allowed_ids].argmax()])
        return int(row.argmax())

    def end_step(self) -> None:
        """Forget the arrays of requests that this step did not use."""
        self._kept, self._used = self._used, {}

    def _penalise(self, row: FloatRow, edited: FloatRow, spec: SampleSpec) -> None:
        params = spec.params
        counts = spec.output_counts or {}
        output_ids = np.fromiter(counts, dtype=np.int64, count=len(counts))
        num_times = np.fromiter(counts.values(), dtype=np.float32, count=len(counts))
        if output_ids.size and (output_ids.min() < 0 or output_ids.max() >= self._vocab_size):
            known = (output_ids >= 0) & (output_ids < self._vocab_size)
            output_ids, num_times = output_ids[known], num_times[known]
        if params.repetition_penalty != 1.0:
            # Both from `row`: a token of prompt and output is penalised once.
            prompt = spec.prompt_token_ids
            if prompt:
                prompt_ids = self._keep(prompt, "prompt", lambda: np.unique(self._in_vocab(prompt)))
                edited[prompt_ids] = _repeated(row[prompt_ids], params.repetition_penalty)
            edited[output_ids] = _repeated(row[output_ids], params.repetition_penalty)
        if params.frequency_penalty or params.presence_penalty:
            edited[output_ids] -= num_times * np.float32(params.frequency_penalty) + np.float32(params.presence_penalty)

    def _allowed_ids(self, params: SamplingParams) -> Ids:
        """Ascending, so that ties go to the lowest."""
        allowed = params.allowed_token_ids or ()
        ids: Ids = self._keep(params, "allowed", lambda: np.unique(self._in_vocab(allowed)))
        return ids

    def _bias_arrays(self, params: SamplingParams) -> tuple[Ids, FloatRow]:
        biases = {token_id: bias for token_id, bias in (params.logit_bias or {}).items() if self._is_known(token_id)}
        return np.array(list(biases), dtype=np.int64), np.array(list(biases.values()), dtype=np.float32)

    def _in_vocab(self, token_ids: Iterable[int]) -> Ids:
        return np.array([token_id for token_id in token_ids if self._is_known(token_id)], dtype=np.int64)

    def _is_known(self, token_id: int) -> bool:
        return 0 <= token_id < self._vocab_size

    def _keep(self, owner: object, what: str, build: Callable[[], Any]) -> Any:
        key = (id(owner), what)
        entry = self._used.get(key) or self._kept.get(key) or (owner, build())
        self._used[key] = entry
        return entry[1]


def _repeated(values: FloatRow, penalty: float) -> FloatRow:
    """The repetition penalty (Keskar et al. 2019): positive logits are divided by it, others multiplied."""
    factor = np.float32(penalty)
    penalised: npt.NDArray[np.float32] = np.where(values > 0, values / factor, values * factor)
    return np.minimum(penalised, np.float32(_LARGEST))


def _bad_word_ends(params: SamplingParams, recent_token_ids: list[int]) -> list[int]:
    """The tokens that would complete a bad word now."""
    ends = []
    for word in params.bad_words:
        num_before = len(word) - 1
        if num_before == 0 or tuple(recent_token_ids[-num_before:]) == word[:-1]:
            ends.append(word[-1])
    return ends
