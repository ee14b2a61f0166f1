"""How long a step takes, from what is in it. Read by everyone who predicts: admission, routing, scheduler, simulator.

    step_s = base + per_row x decode rows + per_prefill_token x prefill tokens + per_context_token x context tokens

The form follows from what a step does: reading the weights (base), projections for each computed token, attention over
each cached one. It follows the machine with a Kalman filter (a random walk per part, Harvey 1989) on the factor by
which each part differs from its initial cost. The walk has a large common share, so that a machine that becomes slower
in steps that only decode is expected to be slower at prefill too; a part that was not seen for long is taken from the
next step that shows it.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

_PRIOR_VARIANCE = 0.25  # of each factor, and the most that not seeing a part lets it grow to
_COMMON_WALK = 0.01**2  # variance a step adds for all parts together
_OWN_WALK = 0.002**2  # and for each on its own
_NOISE = 0.1**2  # variance of a step's time about its mean, relative
_MAX_SURPRISE = 2.0  # relative; a page fault or a stopped process says little about the steps to come
_MIN_FACTOR = 0.01
_AS_PREDICTED = 1e-6  # closer than any clock can tell: a simulated step, which teaches nothing


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds for each part. The defaults are those of the default model on a 2-core machine."""

    base_s: float = 0.009
    decode_row_s: float = 0.0011
    prefill_token_s: float = 0.00054
    context_token_s: float = 2e-7

    def step_s(self, num_prefill_tokens: int, num_decode_rows: int, num_context_tokens: int) -> float:
        """Seconds of a step with this composition."""
        return (
            self.base_s
            + self.decode_row_s * num_decode_rows
            + self.prefill_token_s * num_prefill_tokens
            + self.context_token_s * num_context_tokens
        )


class CostModel:
    """`predict` before any data answers from the initial StepCost; `observe` makes it the machine's own."""

    def __init__(self, initial: StepCost | None = None) -> None:
        self._initial: tuple[float, float, float, float] = astuple(initial or StepCost())
        self._factors = [1.0] * 4
        self._covariance = [[_PRIOR_VARIANCE if i == j else 0.0 for j in range(4)] for i in range(4)]
        self._cost = StepCost(*self._initial)

    @property
    def cost(self) -> StepCost:
        """The parts as they stand."""
        return self._cost

    def predict(self, num_prefill_tokens: int, num_decode_rows: int, num_context_tokens: int) -> float:
        """Seconds of a step with this composition."""
        return self._cost.step_s(num_prefill_tokens, num_decode_rows, num_context_tokens)

    def observe(self, num_prefill_tokens: int, num_decode_rows: int, num_context_tokens: int, seconds: float) -> None:
        """Learn from a step that took this long."""
        predicted_s = self.predict(num_prefill_tokens, num_decode_rows, num_context_tokens)
        if seconds <= 0.0 or predicted_s <= 0.0 or abs(seconds - predicted_s) <= _AS_PREDICTED * predicted_s:
            return
        base, row, prefill, context = self._initial
        # How much each factor contributes to the predicted time: everything is relative to that.
        shares = (
            base / predicted_s,
            row * num_decode_rows / predicted_s,
            prefill * num_prefill_tokens / predicted_s,
            context * num_context_tokens / predicted_s,
        )
        p = self._covariance
        for i in range(4):
            for j in range(4):
                p[i][j] += _COMMON_WALK + (_OWN_WALK if i == j else 0.0)
        _cap_variances(p)
        ps = [sum(p[i][j] * shares[j] for j in range(4)) for i in range(4)]
        spread = _NOISE + sum(shares[i] * ps[i] for i in range(4))
        surprise = min(_MAX_SURPRISE, seconds / predicted_s - 1.0)
        for i in range(4):
            gain = ps[i] / spread
            self._factors[i] = max(_MIN_FACTOR, self._factors[i] + gain * surprise)
            for j in range(4):
                p[i][j] -= gain * ps[j]
        self._cost = StepCost(*(f * part for f, part in zip(self._factors, self._initial, strict=True)))


def _cap_variances(p: list[list[float]]) -> None:
    """Keep each variance at its prior; scaling a row and its column alike keeps the matrix a covariance."""
    for i in range(4):
        if p[i][i] > _PRIOR_VARIANCE:
            scale = (_PRIOR_VARIANCE / p[i][i]) ** 0.5
            for j in range(4):
                p[i][j] *= scale
                p[j][i] *= scale
