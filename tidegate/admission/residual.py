"""What predictions of TTFT have been wrong by, learned from those that were admitted, and corrected for.

The forecast knows nothing of what arrives later and overtakes, of cache hits, or of the text work around the engine.
What they amount to is a factor, learned per kind of request in the logarithm, so
that twice too long and twice too short weigh the same.
"""

from __future__ import annotations

import math

Kind = tuple[bool, bool]
"""(long prompt, more work ahead of it than its own)"""

_GAIN = 0.1
_BOUND = math.log(3.0)


class TtftResidual:
    def __init__(self) -> None:
        self._log_factor: dict[Kind, float] = {}

    def corrected(self, kind: Kind, predicted_s: float) -> float:
        return predicted_s * math.exp(self._log_factor.get(kind, 0.0))

    def observe(self, kind: Kind, corrected_s: float, actual_s: float) -> None:
        """`corrected_s`: what was predicted, correction included, when the request came."""
        if corrected_s <= 0.0 or actual_s <= 0.0:
            return
        value = self._log_factor.get(kind, 0.0) + _GAIN * math.log(actual_s / corrected_s)
        self._log_factor[kind] = min(_BOUND, max(-_BOUND, value))
