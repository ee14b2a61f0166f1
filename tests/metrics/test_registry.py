"""ServerMetrics: the names that dashboards rely on, and figures that come from timelines alone."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tidegate.metrics.load_snapshot import LoadReport, StepStats
from tidegate.metrics.registry import ServerMetrics
from tidegate.metrics.timeline import Timeline
from tidegate.request import PrefillTimes, RequestOutput


def load_report(*, num_running: int) -> LoadReport:
    return LoadReport(
        time_s=1.0,
        num_running=num_running,
        num_waiting=2,
        num_waiting_tokens=100,
        num_context_tokens=1000,
        free_blocks=10,
        cached_blocks=20,
        held_blocks=30,
        step_start_s=0.9,
        step_prefill_tokens=512,
        step_decode_rows=16,
    )


STEP = StepStats(
    step_id=1,
    start_s=0.9,
    compute_s=0.019,
    loop_s=0.020,
    num_prefill_tokens=512,
    num_decode_rows=16,
    num_context_tokens=1000,
    num_preemptions=1,
    num_evictions=4,
)


def samples(metrics: ServerMetrics) -> dict[str, float]:
    """Every sample of the rendered text, labels in its name."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def answered_request() -> Timeline:
    timeline = Timeline("request-1", 1.0, num_prompt_tokens=64, tokenized_s=1.1, queued_s=1.1, dispatched_s=1.2)
    prefill = PrefillTimes(1.2, 1.3, 1.5, 0.15, 0.05, num_cached_tokens=32)
    timeline.on_output(RequestOutput("request-1", 0, [5], 1.5, prefill=prefill), 1.5)
    timeline.on_output(RequestOutput("request-1", 0, [6], 1.6), 1.6)
    timeline.on_output(RequestOutput("request-1", 0, [7], 1.9), 1.9)
    timeline.finish("stop", 2.0)
    return timeline


def test_the_promised_names_are_there_from_the_start() -> None:
    metrics = ServerMetrics()
    metrics.count_outcome("stop")
    names = samples(metrics)
    for name in (
        "tidegate_requests_running",
        "tidegate_requests_waiting",
        "tidegate_kv_blocks{state=free}",
        "tidegate_kv_blocks{state=cached}",
        "tidegate_kv_blocks{state=held}",
        "tidegate_requests_total{outcome=stop}",
        "tidegate_prompt_tokens_total",
        "tidegate_cached_tokens_total",
        "tidegate_generation_tokens_total",
        "tidegate_ttft_seconds_count",
        "tidegate_tpot_seconds_count",
        "tidegate_queue_seconds_count",
        "tidegate_itl_seconds_count",
        "tidegate_e2e_seconds_count",
        "tidegate_prefill_seconds_count",
        "tidegate_step_seconds_count",
        "tidegate_step_prefill_tokens_count",
        "tidegate_step_decode_rows_count",
        "tidegate_preemptions_total",
        "tidegate_evictions_total",
        "tidegate_executor_busy_share",
    ):
        assert name in names


def test_a_request_is_observed_whole() -> None:
    metrics = ServerMetrics()
    metrics.observe_timeline(answered_request())
    found = samples(metrics)
    assert found["tidegate_requests_total{outcome=stop}"] == 1
    assert found["tidegate_prompt_tokens_total"] == 64
    assert found["tidegate_cached_tokens_total"] == 32
    assert found["tidegate_generation_tokens_total"] == 3
    assert found["tidegate_ttft_seconds_sum"] == pytest.approx(0.5)
    assert found["tidegate_tpot_seconds_sum"] == pytest.approx(0.2)
    assert found["tidegate_itl_seconds_count"] == 2
    assert found["tidegate_itl_seconds_sum"] == pytest.approx(0.4)
    assert found["tidegate_queue_seconds_sum"] == pytest.approx(0.2)
    assert found["tidegate_prefill_seconds_sum"] == pytest.approx(0.2)
    assert found["tidegate_e2e_seconds_sum"] == pytest.approx(1.0)


def test_buckets_are_cumulative_and_end_with_all() -> None:
    metrics = ServerMetrics()
    metrics.observe_timeline(answered_request())
    buckets = {name: value for name, value in samples(metrics).items() if name.startswith("tidegate_itl_seconds_b")}
    assert buckets["tidegate_itl_seconds_bucket{le=0.08}"] == 0
    assert buckets["tidegate_itl_seconds_bucket{le=0.2}"] == 1
    assert buckets["tidegate_itl_seconds_bucket{le=0.4}"] == 2
    assert buckets["tidegate_itl_seconds_bucket{le=600.0}"] == 2
    assert buckets["tidegate_itl_seconds_bucket{le=+Inf}"] == 2
    assert list(buckets.values()) == sorted(buckets.values())


def test_an_aborted_request_counts_with_the_tokens_it_got() -> None:
    metrics = ServerMetrics()
    queued_only = Timeline("request-2", 1.0, num_prompt_tokens=8, tokenized_s=1.0, queued_s=1.0)
    queued_only.finish("cancelled", 3.0)
    metrics.observe_timeline(queued_only)
    found = samples(metrics)
    assert found["tidegate_requests_total{outcome=cancelled}"] == 1
    assert found["tidegate_queue_seconds_sum"] == pytest.approx(2.0)
    assert found["tidegate_ttft_seconds_count"] == 0
    assert found["tidegate_generation_tokens_total"] == 0


def test_steps_and_load_are_shown() -> None:
    metrics = ServerMetrics()
    metrics.set_queued(5)
    metrics.set_load(load_report(num_running=3), "a")
    metrics.set_load(load_report(num_running=1), "b")
    metrics.set_load(load_report(num_running=4), "b")
    for _ in range(3):
        metrics.observe_step(STEP)
    found = samples(metrics)
    assert found["tidegate_requests_running"] == 7
    assert found["tidegate_requests_waiting"] == 9
    assert found["tidegate_kv_blocks{state=held}"] == 60
    assert found["tidegate_step_seconds_count"] == 3
    assert found["tidegate_step_prefill_tokens_sum"] == 1536
    assert found["tidegate_preemptions_total"] == 3
    assert found["tidegate_evictions_total"] == 12
    assert found["tidegate_executor_busy_share"] == pytest.approx(0.95)
    metrics.drop_worker("a")
    assert samples(metrics)["tidegate_requests_running"] == 4


def test_two_servers_in_one_process_do_not_mix() -> None:
    first, second = ServerMetrics(), ServerMetrics()
    first.count_outcome("stop")
    first.set_info(version="1", model="m")
    assert "tidegate_requests_total{outcome=stop}" not in samples(second)
    assert samples(first)["tidegate_info{model=m,version=1}"] == 1
