"""The metrics of the KV cache's life, from the counters that engines report.

Owns: their names. Counters are those of each engine since its start, summed over engines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from tidegate.metrics.load_snapshot import AGE_BOUNDS_S, CacheLife


def cache_life_families(lives: Sequence[CacheLife]) -> Iterator[Metric]:
    yield _evictions(lives)
    yield _ages(
        "tidegate_cache_hit_age_seconds",
        "For how long nobody had held a block when a request hit it, one value a block.",
        [life.hits_by_age for life in lives],
        sum(life.hit_age_s for life in lives),
    )
    yield _ages(
        "tidegate_kv_freed_to_reused_seconds",
        "From the end of a block's last holder to its next use for other tokens, one value a block.",
        [life.freed_to_reused for life in lives],
        sum(life.freed_to_reused_s for life in lives),
    )
    yield CounterMetricFamily(
        "tidegate_kv_tail_waste_tokens",
        "Places for tokens that were still empty in the blocks of requests that ended.",
        value=sum(life.num_tail_waste_tokens for life in lives),
    )
    yield CounterMetricFamily(
        "tidegate_kv_finished_blocks",
        "Blocks that requests held when they ended; tail waste a block is the one divided by the other.",
        value=sum(life.num_finished_blocks for life in lives),
    )
    delayed = CounterMetricFamily(
        "tidegate_requests_delayed",
        "Requests that waited with a slot free and reclaimable blocks there: too few of them (blocks), or kept for "
        "what running answers are expected to need (growth).",
        labels=["reason"],
    )
    delayed.add_metric(["blocks"], sum(life.num_delayed_for_blocks for life in lives))
    delayed.add_metric(["growth"], sum(life.num_delayed_for_growth for life in lives))
    yield delayed


def _evictions(lives: Sequence[CacheLife]) -> Metric:
    counts: Counter[tuple[str, str]] = Counter()
    for life in lives:
        counts[life.policy, "room"] += life.num_evictions
        counts[life.policy, "expired"] += life.num_expired
        counts[life.policy, "superseded"] += life.num_superseded
    family = CounterMetricFamily(
        "tidegate_cache_evictions",
        "Cached blocks given up: for room, because their conversation was silent for its time to live (expired), or "
        "because a longer block holds the same (superseded).",
        labels=["policy", "reason"],
    )
    for labels, count in sorted(counts.items()):
        family.add_metric(labels, count)
    return family


def _ages(name: str, documentation: str, counts: Sequence[Sequence[int]], total_s: float) -> Metric:
    buckets = []
    num_below = 0
    for i, bound in enumerate([*map(str, AGE_BOUNDS_S), "+Inf"]):
        num_below += sum(one[i] for one in counts)
        buckets.append((bound, num_below))
    return HistogramMetricFamily(name, documentation, buckets=buckets, sum_value=total_s)
