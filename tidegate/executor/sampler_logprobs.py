"""Log-probabilities as the OpenAI API reports them.

Owns: LogprobReader. They are natural logarithms of the model's own distribution, log-softmax of the raw logits: before
temperature, penalties, bias, masks and filters. So a greedy and a sampled answer report the same numbers, and a chosen
token can be reported as unlikely where a bias or a mask forced it.
"""

from __future__ import annotations

import math

import numpy as np

from tidegate.executor.sampler_groups import FloatRow, VocabGroups
from tidegate.request import TokenLogprobs

LEAST_LOGPROB = -9999.0
"""Stands for everything below it, minus infinity included, which JSON cannot carry."""


class LogprobReader:
    def __init__(self, groups: VocabGroups) -> None:
        self._groups = groups

    def read(self, row: FloatRow, peaks: FloatRow, token_id: int, num_top: int) -> TokenLogprobs:
        """Of one token and the `num_top` most likely ones, best first, equal ones by id.

        `row` holds no NaN or +inf, and `peaks` are its group maxima. A token outside the vocabulary has LEAST_LOGPROB.
        """
        largest = float(peaks.max())
        log_total = largest + math.log(self._groups.sum_exp(row, largest)) if largest > -math.inf else 0.0
        top: list[tuple[int, float]] = []
        if num_top > 0:
            top_ids, logits = self._groups.largest(row, peaks, min(num_top, row.size))
            best_first = np.lexsort((top_ids, -logits))[:num_top]
            pairs = zip(top_ids[best_first].tolist(), logits[best_first].tolist(), strict=True)
            top = [(top_id, _logprob(logit, log_total)) for top_id, logit in pairs]
        known = 0 <= token_id < row.size
        logprob = _logprob(float(row[token_id]), log_total) if known else LEAST_LOGPROB
        return TokenLogprobs(token_id, logprob, tuple(top))


def _logprob(logit: float, log_total: float) -> float:
    return max(min(logit - log_total, 0.0), LEAST_LOGPROB)
