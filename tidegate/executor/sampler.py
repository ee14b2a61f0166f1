"""From logits to tokens: every parameter of SamplingParams, on the CPU, in numpy.

Owns: Sampler, the order in which a request's wishes are applied, and the filters.
Never does: any change to the logits it is given.

    logits ── logprobs are read here ──> edits (penalties, bias, masks) ──> temperature 0: argmax, lowest id of equals
                                                                       └──> min_p, top_k, top_p, then the draw

A row is defined for any input: NaN counts as -inf, +inf as the largest float.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from tidegate.executor.sampler_draw import Drawer
from tidegate.executor.sampler_edits import LogitEdits
from tidegate.executor.sampler_groups import FloatRow, VocabGroups
from tidegate.executor.sampler_logprobs import LogprobReader
from tidegate.executor.sampler_noise import Noise, NoiseSource
from tidegate.request import TokenLogprobs
from tidegate.scheduler.step import SampleSpec

_LARGEST = float(np.finfo(np.float32).max)


class Sampler:
    """Draws the next tokens of a model with `vocab_size` logits. Not thread-safe: it reuses its buffers."""

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 1:
            raise ValueError(f"vocab_size must be at least 1, not {vocab_size}")
        self._vocab_size = vocab_size
        self._groups = VocabGroups(vocab_size)
        self._edits = LogitEdits(vocab_size)
        self._noise = NoiseSource(self._groups.num_groups)
        self._drawer = Drawer(self._groups)
        self._logprobs = LogprobReader(self._groups)

    def sample(
        self, logits: npt.NDArray[np.float32], specs: list[SampleSpec]
    ) -> tuple[list[int], list[TokenLogprobs | None] | None]:
        """One token for each row of `logits` [num_samples, vocab_size], and log-probabilities where they are wanted.

        The second part is None when no spec asks for any. Raises ValueError when the shape does not fit the specs.
        """
        if logits.shape != (len(specs), self._vocab_size):
            raise ValueError(f"{len(specs)} samples of {self._vocab_size} logits, but shape {logits.shape}")
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        noises = self._noise.of_draws([(spec.seed, spec.position) for spec in specs if not _is_greedy(spec)])
        with np.errstate(all="ignore"):
            for row, spec in zip(logits, specs, strict=True):
                noise = None if _is_greedy(spec) else next(noises)
                token_id, entry = self._sample_row(row, spec, noise)
                token_ids.append(token_id)
                logprobs.append(entry)
        self._edits.end_step()
        return token_ids, logprobs if any(entry is not None for entry in logprobs) else None

    def token_logprobs(
        self, logits: npt.NDArray[np.float32], token_ids: list[int], num_top: int
    ) -> list[TokenLogprobs]:
        """Log-probabilities of given tokens, one a row of `logits`, and of the `num_top` most likely beside each."""
        if logits.shape != (len(token_ids), self._vocab_size):
            raise ValueError(f"{len(token_ids)} tokens of {self._vocab_size} logits, but shape {logits.shape}")
        with np.errstate(all="ignore"):
            return [
                self._logprobs.read(*self._cleaned(row), token_id, num_top)
                for row, token_id in zip(logits, token_ids, strict=True)
            ]

    def _sample_row(self, row: FloatRow, spec: SampleSpec, noise: Noise | None) -> tuple[int, TokenLogprobs | None]:
        """The row's token: greedy without noise, drawn with it."""
        params = spec.params
        is_edited = self._edits.needed(spec)
        if noise is None and not is_edited and params.logprobs is None:
            token_id = int(row.argmax())
            if not math.isnan(row[token_id]):
                return token_id, None
        wanted, peaks = self._edited(row, spec) if is_edited else self._cleaned(row)
        if _peak(peaks) == -math.inf:
            token_id = self._edits.fallback(self._cleaned(row)[0], params)
        elif noise is None:
            token_id = int(wanted.argmax())
        else:
            token_id = self._drawer.draw(wanted, peaks, params, noise)
        if params.logprobs is None:
            return token_id, None
        raw_row, raw_peaks = self._cleaned(row) if is_edited else (wanted, peaks)
        return token_id, self._logprobs.read(raw_row, raw_peaks, token_id, params.logprobs)

    def _edited(self, row: FloatRow, spec: SampleSpec) -> tuple[FloatRow, FloatRow]:
        """The row with the request's edits, and its group maxima. NaN and +inf do not survive, as in _cleaned."""
        edited = self._edits.apply(row, spec)
        peaks = self._groups.peaks(edited)
        if not _peak(peaks) < math.inf:
            edited = self._edits.apply(self._cleaned(row)[0], spec)
            peaks = self._groups.peaks(edited)
        return edited, peaks

    def _cleaned(self, row: FloatRow) -> tuple[FloatRow, FloatRow]:
        """The row without NaN and +inf, itself where it has none, and its group maxima."""
        peaks = self._groups.peaks(row)
        if _peak(peaks) < math.inf:
            return row, peaks
        row = np.nan_to_num(row, nan=-np.inf, posinf=_LARGEST, neginf=-np.inf)
        return row, self._groups.peaks(row)


def _is_greedy(spec: SampleSpec) -> bool:
    """top_k 1 is greedy too, so that it gives one answer where logits are equal."""
    return spec.params.temperature == 0.0 or spec.params.top_k == 1


def _peak(peaks: FloatRow) -> float:
    """The largest logit, or NaN if there is one (argmax finds it first; several times as fast as max)."""
    return float(peaks[peaks.argmax()])
