"""One draw from one row of logits: temperature, the filters min_p, top_k and top_p, and the race for the token.

Owns: Drawer. Never does: greedy choice, edits of logits, or any randomness but the Noise it is given.

The filters apply in that order, each to the distribution that the one before left, after temperature. Each keeps every
token whose logit reaches a bar: tokens equal to the last one kept are kept too, so no filter depends on ids or order.
The draw is the argmax of logit + T * Gumbel noise, and a filter does not change the noise of the tokens it keeps.
"""

from __future__ import annotations

import math

import numpy as np

from tidegate.executor.sampler_groups import FloatRow, VocabGroups
from tidegate.executor.sampler_noise import Noise
from tidegate.request import SamplingParams

_LOWEST = float(np.finfo(np.float32).min)


class Drawer:
    def __init__(self, groups: VocabGroups) -> None:
        self._groups = groups

    def draw(self, row: FloatRow, peaks: FloatRow, params: SamplingParams, noise: Noise) -> int:
        """The token with the best logit + T * noise among those that the filters keep.

        `row` holds no NaN or +inf, and something above -inf; `peaks` are its group maxima.

        top_p needs no sorted vocabulary: the token that wins among all also wins in the nucleus, if it is in it. If it
        is not, then neither is any token with its logit or less, and the draw goes on among the tokens above.
        """
        temperature = params.temperature
        largest = float(peaks[peaks.argmax()])
        floor = self._floor(row, peaks, largest, params)
        token_id = self._race(row, peaks, largest, temperature, floor, noise)
        if params.top_p >= 1.0:
            return token_id
        total = 0.0
        while row[token_id] < largest:
            above = float(np.nextafter(row[token_id], np.float32(np.inf)))
            mass_above = self._mass(row, peaks, temperature, largest, above)
            # Most draws are settled by a bound: the peaks alone are a part of the mass.
            if floor == -math.inf and mass_above < params.top_p * self._groups.sum_exp(peaks, largest, temperature):
                break
            total = total or self._mass(row, peaks, temperature, largest, floor)
            if mass_above < params.top_p * total:
                break
            token_id = self._race(row, peaks, largest, temperature, above, noise)
        return token_id

    def _floor(self, row: FloatRow, peaks: FloatRow, largest: float, params: SamplingParams) -> float:
        """The least logit that min_p and top_k keep."""
        floor = -math.inf
        if params.min_p > 0.0:
            floor = largest + params.temperature * math.log(params.min_p)
        if 0 < params.top_k < row.size:
            floor = max(floor, float(self._groups.largest(row, peaks, params.top_k)[1].min()))
        return floor

    def _mass(self, row: FloatRow, peaks: FloatRow, temperature: float, largest: float, floor: float) -> float:
        """Sum of exp((logit - largest) / T) over the tokens with at least `floor`."""
        values = row if floor == -math.inf else row[self._groups.at_least(row, peaks, floor)]
        return self._groups.sum_exp(values, largest, temperature)

    def _race(
        self, row: FloatRow, peaks: FloatRow, largest: float, temperature: float, floor: float, noise: Noise
    ) -> int:
        """argmax(logit + T * noise) over the tokens with at least `floor`.

        A group's best noise is bounded, and with its peak bounds the scores of its tokens; the score of one good leader
        is known. What lies between is a dozen tokens or so, and only they need exact noise. Bounds are float32: what
        they can be off is in `slack`.
        """
        groups = self._groups
        reach = np.float32(temperature) * noise.log_least
        leader_logits = groups.logits_at(row, noise.leaders)
        if floor > -math.inf:
            leader_logits[leader_logits < floor] = -np.inf
        best_leader = int((leader_logits - reach).argmax())
        best = float(leader_logits[best_leader]) - temperature * noise.log_least_of(best_leader)
        slack = 1e-4 * temperature + 1e-6 * max(abs(best), abs(largest))
        least = max(best - slack, _LOWEST)  # where no leader may be drawn, anything above -inf contends
        may_win = peaks - reach >= least
        if floor > -math.inf:
            may_win &= peaks >= floor
        group_ids = may_win.nonzero()[0]
        token_ids, logits = groups.members(row, group_ids)
        contends = logits - reach[group_ids][:, None] >= least
        if floor > -math.inf:
            contends &= logits >= floor
        which, places = contends.nonzero()
        group_ids, token_ids, logits = group_ids[which], token_ids[contends], logits[contends]
        scores = logits - temperature * noise.log_exponentials(token_ids, group_ids, places)
        return int(token_ids[scores.argmax()])
