"""What predictions of TTFT have been wrong by, learned from those that were admitted, and corrected for.

The forecast knows nothing of what arrives later and overtakes, of cache hits, or of the text work around the engine.
What they amount to is a factor, learned per kind of request (long or short prompt, queued or not) in the logarithm, so
that twice too long and twice too short weigh the same.
"""

from __future__ import annotations

import math

_GAIN = 0.1
_BOUND = math.log(3.0)


class TtftResidual:
    def __init__(self) -> None:
        self._log_factor: dict[tuple[bool, bool], float] = {}

    def corrected(self, predicted_s: float, *, is_long: bool, is_queued: bool) -> float:
        return predicted_s * math.exp(self._log_factor.get((is_long, is_queued), 0.0))

    def observe(self, corrected_s: float, actual_s: float, *, is_long: bool, is_queued: bool) -> None:
        """`corrected_s`: what was predicted, correction included, when the request came."""
        if corrected_s <= 0.0 or actual_s <= 0.0:
            return
        kind = (is_long, is_queued)
        value = self._log_factor.get(kind, 0.0) + _GAIN * math.log(actual_s / corrected_s)
        self._log_factor[kind] = min(_BOUND, max(-_BOUND, value))
