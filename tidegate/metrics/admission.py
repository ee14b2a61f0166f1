"""AdmissionMetrics: what was decided at the gate, and how true the predictions were that it was decided by.

Owns: counts of decisions, and predictions against what happened, all by service tier. Each prediction was made when the
request came and is judged when the outcome is known; requests that were not served have nothing to judge.
Never does: predict, or decide.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from tidegate.metrics.histogram import Histogram

ERROR_BOUNDS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 2.0, 5.0)
"""Relative errors; 1.0 is a prediction of twice what happened, or of next to nothing."""

_QUANTITIES = {"ttft": "Time to first token", "tpot": "Time per output token"}


class _Judged:
    """One quantity in one tier: predicted against actual."""

    __slots__ = ("actual_s", "errors", "predicted_s")

    def __init__(self) -> None:
        self.errors = Histogram(ERROR_BOUNDS)
        self.predicted_s = 0.0
        self.actual_s = 0.0


class AdmissionMetrics:
    def __init__(self) -> None:
        self._num_decisions: Counter[tuple[str, str, str]] = Counter()
        self._judged: dict[str, dict[str, _Judged]] = {quantity: {} for quantity in _QUANTITIES}
        self._num_lengths: Counter[tuple[str, bool]] = Counter()

    def count(self, action: str, reason: str, tier: str) -> None:
        """A decision on a request that asked for this tier."""
        self._num_decisions[action, reason, tier] += 1

    def judge(self, quantity: str, tier: str, predicted_s: float, actual_s: float) -> None:
        """A prediction of `ttft` or `tpot`, and what it was a prediction of."""
        if actual_s <= 0.0:
            return
        judged = self._judged[quantity].setdefault(tier, _Judged())
        judged.errors.observe(abs(predicted_s - actual_s) / actual_s)
        judged.predicted_s += predicted_s
        judged.actual_s += actual_s

    def judge_length(self, tier: str, predicted_p90: float, num_tokens: int) -> None:
        """An answer has ended, or its client has had enough; it should be no longer than this, nine times in ten."""
        self._num_lengths[tier, num_tokens <= predicted_p90] += 1

    def families(self) -> Iterator[Metric]:
        decisions = CounterMetricFamily(
            "tidegate_admission",
            "Decisions at the gate, by the tier that was asked for. With admission=observe: what would have been done. "
            "expire: refused from the queue.",
            labels=["action", "reason", "tier"],
        )
        for labels, num_decisions in sorted(self._num_decisions.items()):
            decisions.add_metric(labels, num_decisions)
        yield decisions
        for quantity, what in _QUANTITIES.items():
            yield from _judged_families(quantity, what, self._judged[quantity])
        lengths = CounterMetricFamily(
            "tidegate_output_length_p90",
            "Answers by whether they stayed within the 90th percentile that was predicted for them.",
            labels=["tier", "within"],
        )
        for (tier, is_within), num_answers in sorted(self._num_lengths.items()):
            lengths.add_metric([tier, "true" if is_within else "false"], num_answers)
        yield lengths


def _judged_families(quantity: str, what: str, by_tier: dict[str, _Judged]) -> Iterator[Metric]:
    errors = HistogramMetricFamily(
        f"tidegate_{quantity}_prediction_error_ratio",
        f"{what}: |predicted - actual| / actual, of requests that were served.",
        labels=["tier"],
    )
    predicted = CounterMetricFamily(
        f"tidegate_{quantity}_predicted_seconds", f"{what}: sum of predictions that have been judged.", labels=["tier"]
    )
    actual = CounterMetricFamily(
        f"tidegate_{quantity}_actual_seconds", f"{what}: sum of what they were predictions of.", labels=["tier"]
    )
    for tier, judged in sorted(by_tier.items()):
        errors.add_metric([tier], judged.errors.cumulative(), judged.errors.total)
        predicted.add_metric([tier], judged.predicted_s)
        actual.add_metric([tier], judged.actual_s)
    yield from (errors, predicted, actual)
