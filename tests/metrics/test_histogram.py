"""Histogram: every value is in one bucket, merged or not, and quantiles never fall below the truth."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.metrics.histogram import COUNT_BOUNDS, LATENCY_BOUNDS_S, Histogram

_VALUES_S = st.lists(st.floats(0.0, 2000.0, allow_nan=False), max_size=50)


def filled(values_s: list[float]) -> Histogram:
    histogram = Histogram()
    for value_s in values_s:
        histogram.observe(value_s)
    return histogram


def test_bounds_rise_from_one_millisecond_to_ten_minutes() -> None:
    assert list(LATENCY_BOUNDS_S) == sorted(set(LATENCY_BOUNDS_S))
    assert (LATENCY_BOUNDS_S[0], LATENCY_BOUNDS_S[-1]) == (0.001, 600.0)
    assert list(COUNT_BOUNDS) == sorted(set(COUNT_BOUNDS))


def test_a_value_on_a_bound_is_in_the_bucket_below_it() -> None:
    histogram = filled([0.001, 0.0011])
    assert histogram.cumulative()[0] == ("0.001", 1.0)
    assert histogram.cumulative()[1] == ("0.0012", 2.0)


@given(_VALUES_S, _VALUES_S)
def test_merged_equals_observed_together(left_s: list[float], right_s: list[float]) -> None:
    merged = filled(left_s)
    merged.merge(filled(right_s))
    together = filled(left_s + right_s)
    assert merged.counts == together.counts
    assert merged.total == pytest.approx(together.total)
    assert merged.max_value == together.max_value


@given(st.lists(st.floats(0.0, 2000.0, allow_nan=False), min_size=1, max_size=50), st.floats(0.01, 1.0))
def test_a_quantile_is_at_least_the_true_one_and_at_most_the_largest(values_s: list[float], share: float) -> None:
    quantile_s = filled(values_s).quantile(share)
    assert quantile_s is not None
    rank = next(index for index in range(1, len(values_s) + 1) if index >= share * len(values_s))
    assert sorted(values_s)[rank - 1] <= quantile_s <= max(values_s)


def test_no_values_no_quantile() -> None:
    assert Histogram().quantile(0.5) is None


def test_other_bounds_are_refused() -> None:
    with pytest.raises(ValueError, match="different bounds"):
        Histogram().merge(Histogram(COUNT_BOUNDS))
