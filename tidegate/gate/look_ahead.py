"""How many requests a worker may hold beyond its slots, so that a freed slot is never idle for want of work.

A slot that a step frees is known to the gate one hop later; what it then sends can join only a later step. So the
worker must already hold as many waiting requests as the slots that free up until a new one could arrive: the mean
number of ends in (1 step + hop), plus one standard deviation (ends are close to Poisson). Anything more would be
backlog where the gate's order can no longer act.
"""

from __future__ import annotations

import math

_GAIN = 0.05


class LookAhead:
    def __init__(self, max_num_seqs: int) -> None:
        self._max = max_num_seqs
        self._ends_per_step = 0.5
        self._step_s = 0.02
        self._hop_s = 0.001

    def observe_step(self, step_s: float, num_ended: int, hop_s: float) -> None:
        """A step took step_s and ended num_ended choices; its report took hop_s to get here."""
        self._ends_per_step += _GAIN * (num_ended - self._ends_per_step)
        if step_s > 0.0:
            self._step_s += _GAIN * (step_s - self._step_s)
        self._hop_s += _GAIN * (max(0.0, hop_s) - self._hop_s)

    @property
    def num_requests(self) -> int:
        mean = self._ends_per_step * (1.0 + 2.0 * self._hop_s / max(self._step_s, 1e-6))
        return min(self._max, max(1, math.ceil(mean + math.sqrt(mean))))
