"""How long a step takes, from what is in it. Read by everyone who predicts: admission, routing, scheduler, simulator.

    step_s = base + per_row x decode rows + per_prefill_token x prefill tokens + per_context_token x context tokens

The form follows from what a step does: reading the weights (base), projections for each computed token, attention over
each cached one. It is fitted to the steps as they happen (recursive least squares with forgetting, in units that make
a common step about 1 in every feature), with a fast factor on top that follows the machine's speed from step to step.
"""

from __future__ import annotations

from dataclasses import dataclass

_UNITS = (1.0, 10.0, 100.0, 10_000.0)
_FORGETTING = 0.995
_INITIAL_VARIANCE = 1.0
_MAX_VARIANCE = 10.0
_SPEED_GAIN = 0.1
_OUTLIER = 4.0


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds for each part. The defaults are those of the default model on a 2-core machine."""

    base_s: float = 0.009
    decode_row_s: float = 0.0011
    prefill_token_s: float = 0.00054
    context_token_s: float = 2e-7


class CostModel:
    """`predict` before any data answers from the initial StepCost; `observe` makes it the machine's own."""

    def __init__(self, initial: StepCost | None = None) -> None:
        cost = initial or StepCost()
        self._weights = [
            cost.base_s * _UNITS[0],
            cost.decode_row_s * _UNITS[1],
            cost.prefill_token_s * _UNITS[2],
            cost.context_token_s * _UNITS[3],
        ]
        self._covariance = [[_INITIAL_VARIANCE if i == j else 0.0 for j in range(4)] for i in range(4)]
        self._speed = 1.0
        self.num_observed = 0

    @property
    def cost(self) -> StepCost:
        """The parts as they stand, speed included."""
        parts = [max(0.0, w) * self._speed / u for w, u in zip(self._weights, _UNITS, strict=True)]
        return StepCost(*parts)

    def predict(self, num_prefill_tokens: int, num_decode_rows: int, num_context_tokens: int) -> float:
        """Seconds of a step with this composition."""
        return self._speed * self._structure(_features(num_prefill_tokens, num_decode_rows, num_context_tokens))

    def prefill_s(self, num_tokens: int) -> float:
        """Seconds that computing these prompt tokens adds to the steps that take them along."""
        return self._speed * max(0.0, self._weights[2]) / _UNITS[2] * num_tokens

    def observe(self, num_prefill_tokens: int, num_decode_rows: int, num_context_tokens: int, seconds: float) -> None:
        """Learn from a step that took this long."""
        x = _features(num_prefill_tokens, num_decode_rows, num_context_tokens)
        structure = self._structure(x)
        if structure <= 0.0 or seconds <= 0.0:
            return
        self.num_observed += 1
        ratio = seconds / structure
        gain = max(_SPEED_GAIN, 1.0 / self.num_observed)
        # One slow step (a page fault, another process) says little; many in a row move the speed all the same.
        bounded = min(max(ratio, self._speed / _OUTLIER), self._speed * _OUTLIER)
        self._speed += gain * (bounded - self._speed)
        self._fit(x, seconds / self._speed)

    def _structure(self, x: tuple[float, float, float, float]) -> float:
        return sum(max(0.0, w) * f for w, f in zip(self._weights, x, strict=True))

    def _fit(self, x: tuple[float, float, float, float], seconds: float) -> None:
        """One step of recursive least squares on relative error (each step is weighed by 1 / its predicted time)."""
        scale = 1.0 / max(1e-6, self._structure(x))
        z = [f * scale for f in x]
        error = seconds * scale - sum(w * f for w, f in zip(self._weights, z, strict=True))
        p = self._covariance
        pz = [sum(row[j] * z[j] for j in range(4)) for row in p]
        denominator = _FORGETTING + sum(z[i] * pz[i] for i in range(4))
        for i in range(4):
            k = pz[i] / denominator
            self._weights[i] += k * error
            for j in range(4):
                p[i][j] = (p[i][j] - k * pz[j]) / _FORGETTING
        trace = sum(p[i][i] for i in range(4))
        if trace > _MAX_VARIANCE:
            # Without variety in the steps, forgetting would let the covariance grow without bound.
            for i in range(4):
                for j in range(4):
                    p[i][j] *= _MAX_VARIANCE / trace


def _features(
    num_prefill_tokens: int, num_decode_rows: int, num_context_tokens: int
) -> tuple[float, float, float, float]:
    return (
        1.0 / _UNITS[0],
        num_decode_rows / _UNITS[1],
        num_prefill_tokens / _UNITS[2],
        num_context_tokens / _UNITS[3],
    )
