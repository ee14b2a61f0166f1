"""The metrics of the cache's life: names, labels, sums over workers, and that nothing is lost with a worker."""

from __future__ import annotations

from msgspec.structs import replace

from tests.metrics.test_registry import load_report, samples
from tidegate.metrics.load_snapshot import AGE_BOUNDS_S, CacheLife
from tidegate.metrics.registry import ServerMetrics

LIFE = CacheLife(
    policy="lru",
    num_evictions=5,
    num_expired=3,
    num_superseded=2,
    hits_by_age=(4, 0, 2, 0, 0, 0, 1),
    hit_age_s=5000.0,
    freed_to_reused=(1,) * 7,
    freed_to_reused_s=9000.0,
    num_tail_waste_tokens=40,
    num_finished_blocks=10,
    num_delayed_for_growth=6,
    num_delayed_for_blocks=7,
)


def test_each_figure_has_its_name() -> None:
    metrics = ServerMetrics()
    metrics.set_load(replace(load_report(num_running=1), cache=LIFE))
    found = samples(metrics)
    assert len(AGE_BOUNDS_S) == 6
    assert found["tidegate_cache_evictions_total{policy=lru,reason=room}"] == 5
    assert found["tidegate_cache_evictions_total{policy=lru,reason=expired}"] == 3
    assert found["tidegate_cache_evictions_total{policy=lru,reason=superseded}"] == 2
    assert found["tidegate_cache_hit_age_seconds_bucket{le=0.1}"] == 4
    assert found["tidegate_cache_hit_age_seconds_bucket{le=10.0}"] == 6
    assert found["tidegate_cache_hit_age_seconds_count"] == 7
    assert found["tidegate_cache_hit_age_seconds_sum"] == 5000
    assert found["tidegate_kv_freed_to_reused_seconds_count"] == 7
    assert found["tidegate_kv_tail_waste_tokens_total"] == 40
    assert found["tidegate_kv_finished_blocks_total"] == 10
    assert found["tidegate_requests_delayed_total{reason=growth}"] == 6
    assert found["tidegate_requests_delayed_total{reason=blocks}"] == 7


def test_a_worker_that_is_gone_leaves_its_counts() -> None:
    metrics = ServerMetrics()
    metrics.set_load(replace(load_report(num_running=1), cache=LIFE), "a")
    metrics.set_load(replace(load_report(num_running=1), cache=LIFE), "b")
    metrics.drop_worker("a")
    assert samples(metrics)["tidegate_cache_evictions_total{policy=lru,reason=room}"] == 10
