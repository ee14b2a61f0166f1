"""Histogram: counts in fixed buckets, cheap enough to be fed once a token.

Owns: the bucket bounds of all latency metrics. A value lies in the first bucket whose bound it does not exceed (`le`,
as Prometheus has it); the last bucket has no bound. Histograms of equal bounds can be merged, so that each request
gathers its own and the server's is updated once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

_DECADE = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)
LATENCY_BOUNDS_S: tuple[float, ...] = (
    *(round(mantissa * 10.0**exponent, 6) for exponent in range(-3, 2) for mantissa in _DECADE),
    100.0,
    200.0,
    300.0,
    600.0,
)
"""1 ms to 10 min, at most a third apart up to 100 s."""

COUNT_BOUNDS: tuple[float, ...] = (0.0, *(float(2**exponent) for exponent in range(15)))
"""0 and the powers of two up to 16,384: rows, tokens."""


class Histogram:
    __slots__ = ("bounds", "counts", "max_value", "total")

    def __init__(self, bounds: Sequence[float] = LATENCY_BOUNDS_S) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        self.max_value = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times
        if value > self.max_value:
            self.max_value = value

    def merge(self, other: Histogram) -> None:
        """Add what `other` holds. Raises ValueError when its bounds differ."""
        if other.bounds != self.bounds:
            raise ValueError("histograms of different bounds cannot be merged")
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.total += other.total
        self.max_value = max(self.max_value, other.max_value)

    @property
    def count(self) -> int:
        return sum(self.counts)

    def quantile(self, share: float) -> float | None:
        """An upper estimate: the bound of the bucket that the quantile lies in, at most the largest value seen."""
        count = self.count
        if count == 0:
            return None
        rank = share * count
        running = 0
        for bound, bucket_count in zip(self.bounds, self.counts, strict=False):
            running += bucket_count
            if running >= rank:
                return min(bound, self.max_value)
        return self.max_value

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound as Prometheus writes it, number of values up to it), the last bound being +Inf."""
        buckets: list[tuple[str, float]] = []
        running = 0
        for bound, bucket_count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            running += bucket_count
            buckets.append(("+Inf" if bound == float("inf") else repr(bound), float(running)))
        return buckets
