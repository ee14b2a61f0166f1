"""From logits to tokens: every parameter of SamplingParams, on the CPU, in numpy.

Owns: Sampler, the order in which a request's wishes are applied, and the filters.
Never does: any change to the logits it is given.

    logits ── logprobs are read here ──> edits (penalties, bias, masks) ──> temperature 0: argmax, lowest id of equals
                                                                       └──> min_p, top_k, top_p, then the draw

The filters apply in that order, each to the distribution that the one before left, after temperature. Each keeps every
token whose logit reaches a bar: tokens equal to the last one kept are kept too, so no filter depends on ids or order.
The draw is the argmax of logit + T * Gumbel noise (sampler_noise), and a filter does not change the survivors' noise.

A row is defined for any input: NaN counts as -inf, +inf as the largest float.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from tidegate.executor.sampler_edits import LogitEdits
from tidegate.executor.sampler_groups import FloatRow, VocabGroups
from tidegate.executor.sampler_logprobs import LogprobReader
from tidegate.executor.sampler_noise import Noise
from tidegate.request import SamplingParams, TokenLogprobs
from tidegate.scheduler.step import SampleSpec

_LARGEST = float(np.finfo(np.float32).max)
_LEAST_TEMPERATURE = 1e-30


class Sampler:
    """Draws the next tokens of a model with `vocab_size` logits. Not thread-safe: it reuses its buffers."""

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 1:
            raise ValueError(f"vocab_size must be at least 1, not {vocab_size}")
        self._vocab_size = vocab_size
        self._groups = VocabGroups(vocab_size)
        self._edits = LogitEdits(vocab_size)
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
        with np.errstate(all="ignore"):
            for row, spec in zip(logits, specs, strict=True):
                token_id, entry = self._sample_row(row, spec)
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

    def _sample_row(self, row: FloatRow, spec: SampleSpec) -> tuple[int, TokenLogprobs | None]:
        params = spec.params
        is_greedy = params.temperature == 0.0 or params.top_k == 1
        is_edited = self._edits.needed(spec)
        if is_greedy and not is_edited and params.logprobs is None:
            token_id = int(row.argmax())
            if not math.isnan(row[token_id]):
                return token_id, None
        row, peaks = self._cleaned(row)
        raw_row, raw_peaks = row, peaks
        if is_edited:
            row = self._edits.apply(row, spec)
            peaks = self._groups.peaks(row)
        if float(peaks.max()) == -math.inf:
            token_id = self._edits.fallback(raw_row, params)
        elif is_greedy:
            token_id = int(row.argmax())
        else:
            token_id = self._draw(row, peaks, spec)
        if params.logprobs is None:
            return token_id, None
        return token_id, self._logprobs.read(raw_row, raw_peaks, token_id, params.logprobs)

    def _cleaned(self, row: FloatRow) -> tuple[FloatRow, FloatRow]:
        """The row without NaN and +inf, itself where it has none, and its group maxima."""
        peaks = self._groups.peaks(row)
        if float(peaks.max()) < math.inf:
            return row, peaks
        row = np.nan_to_num(row, nan=-np.inf, posinf=_LARGEST, neginf=-np.inf)
        return row, self._groups.peaks(row)

    def _draw(self, row: FloatRow, peaks: FloatRow, spec: SampleSpec) -> int:
        """The token with the best logit + T * noise among those that the filters keep. Some logit is above -inf.

        top_p needs no sorted vocabulary: the token that wins among all is also the one that wins in the nucleus, if it
        is in it. If not, then everything up to its logit is outside, and the draw goes on among the tokens above.
        """
        params = spec.params
        noise = Noise(spec.seed, spec.position, self._groups.num_groups)
        floor = self._floor(row, peaks, params)
        if params.top_p >= 1.0:
            return self._race(row, peaks, params.temperature, floor, noise)
        nucleus_mass = params.top_p * self._mass(row, peaks, params.temperature, floor)
        while True:
            token_id = self._race(row, peaks, params.temperature, floor, noise)
            above = float(np.nextafter(row[token_id], np.float32(np.inf)))
            if self._mass(row, peaks, params.temperature, above) < nucleus_mass:
                return token_id
            floor = above

    def _floor(self, row: FloatRow, peaks: FloatRow, params: SamplingParams) -> float:
        """The least logit that min_p and top_k keep."""
        floor = -math.inf
        if params.min_p > 0.0:
            least = float(peaks.max()) + params.temperature * math.log(params.min_p)
            floor = min(least, float(peaks.max()))
        if 0 < params.top_k < self._vocab_size:
            floor = max(floor, self._groups.kth_largest(row, peaks, params.top_k))
        return floor

    def _mass(self, row: FloatRow, peaks: FloatRow, temperature: float, floor: float) -> float:
        """Sum of exp((logit - largest logit) / T) over the tokens with at least `floor`."""
        largest = peaks.max()
        if floor > largest:
            return 0.0
        values = row if floor == -math.inf else row[self._groups.at_least(row, peaks, floor)]
        scaled = values - largest
        scaled *= np.float32(1.0 / max(temperature, _LEAST_TEMPERATURE))
        return float(np.exp(scaled, out=scaled).sum())

    def _race(self, row: FloatRow, peaks: FloatRow, temperature: float, floor: float, noise: Noise) -> int:
        """argmax(logit + T * noise) over the tokens with at least `floor`; the lowest id of equals.

        A group's best logit and best noise bound all its tokens: groups below what one group reaches are out.
        """
        bounds = peaks + temperature * noise.group_gumbels
        if floor > -math.inf:
            bounds[peaks < floor] = -np.inf
        _, best = self._best_of(row, np.array([bounds.argmax()]), temperature, floor, noise)
        token_id, _ = self._best_of(row, np.flatnonzero(bounds >= best), temperature, floor, noise)
        return token_id

    def _best_of(
        self, row: FloatRow, group_ids: npt.NDArray[np.int64], temperature: float, floor: float, noise: Noise
    ) -> tuple[int, float]:
        token_ids = self._groups.members(group_ids)
        values = row[token_ids]
        if floor > -math.inf:
            kept = values >= floor
            token_ids, values = token_ids[kept], values[kept]
        scores = values + temperature * noise.gumbels(token_ids)
        best = float(scores.max())
        return int(token_ids[scores == best].min()), best
