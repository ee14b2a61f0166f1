"""Timeline: the parts of a TTFT add up, latencies are what the field means by them, and a slow one has its cause."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.metrics.timeline import Cause, Timeline
from tidegate.request import FinishReason, PrefillTimes, RequestOutput

_DURATIONS_S = st.floats(0.0, 100.0, allow_nan=False)


def make_timeline(
    *,
    tokenize_s: float = 0.001,
    admission_s: float = 0.0005,
    queue_s: float = 0.01,
    hop_s: float = 0.0002,
    batch_wait_s: float = 0.003,
    own_prefill_s: float = 0.05,
    interference_s: float = 0.02,
    hop_back_s: float = 0.0003,
    clock_offset_s: float = 0.0,
    num_preemptions: int = 0,
    received_s: float = 100.0,
) -> Timeline:
    """A request with its first token. `clock_offset_s`: the worker's clock minus the frontend's."""
    timeline = Timeline("request-1", received_s, num_prompt_tokens=64)
    timeline.tokenized_s = received_s + tokenize_s
    timeline.queued_s = timeline.tokenized_s + admission_s
    timeline.dispatched_s = timeline.queued_s + queue_s
    worker_s = timeline.dispatched_s + hop_s + clock_offset_s
    scheduled_s = worker_s + batch_wait_s
    first_token_s = scheduled_s + own_prefill_s + interference_s
    prefill = PrefillTimes(worker_s, scheduled_s, first_token_s, own_prefill_s, interference_s, num_cached_tokens=32)
    output = RequestOutput("request-1", 0, [7], first_token_s, prefill=prefill, num_preemptions=num_preemptions)
    timeline.on_output(output, first_token_s - clock_offset_s + hop_back_s)
    return timeline


def add_tokens(timeline: Timeline, times_s: list[float], *, index: int = 0, num_tokens: int = 1) -> None:
    for time_s in times_s:
        timeline.on_output(RequestOutput("request-1", index, [7] * num_tokens, time_s), time_s)


@given(
    durations_s=st.lists(_DURATIONS_S, min_size=8, max_size=8),
    clock_offset_s=st.floats(-1e6, 1e6, allow_nan=False),
)
def test_the_parts_add_up_to_the_ttft_whatever_the_workers_clock_says(
    durations_s: list[float], clock_offset_s: float
) -> None:
    tokenize_s, admission_s, queue_s, hop_s, batch_wait_s, own_prefill_s, interference_s, hop_back_s = durations_s
    timeline = make_timeline(
        tokenize_s=tokenize_s,
        admission_s=admission_s,
        queue_s=queue_s,
        hop_s=hop_s,
        batch_wait_s=batch_wait_s,
        own_prefill_s=own_prefill_s,
        interference_s=interference_s,
        hop_back_s=hop_back_s,
        clock_offset_s=clock_offset_s,
    )
    parts, ttft_s = timeline.ttft_parts(), timeline.ttft_s
    assert parts is not None and ttft_s is not None
    assert parts.sum_s == pytest.approx(ttft_s, abs=1e-3)
    assert ttft_s == pytest.approx(sum(durations_s), abs=1e-3)
    assert parts.dispatch_s == pytest.approx(hop_s + hop_back_s, abs=1e-3)
    assert parts.gate_wait_s == pytest.approx(admission_s + queue_s, abs=1e-3)


def test_the_dict_holds_parts_that_add_up_and_is_ready_for_json() -> None:
    timeline = make_timeline()
    add_tokens(timeline, [100.2, 100.3])
    timeline.finish("stop", 100.31)
    document = json.loads(json.dumps(timeline.as_dict()))
    assert sum(document["ttft_parts_s"].values()) == pytest.approx(document["ttft_s"], abs=1e-5)
    assert document["outcome"] == "stop"
    assert document["output_tokens"] == 3
    assert document["cached_tokens"] == 32
    milestones = [value for value in document["milestones_s"].values() if value is not None]
    assert milestones == sorted(milestones) and milestones[0] == 0.0


def test_tpot_is_the_span_of_the_tokens_over_the_gaps() -> None:
    timeline = make_timeline(tokenize_s=0.0)
    first_token_s = timeline.first_token_s
    assert first_token_s is not None
    assert timeline.tpot_s is None
    add_tokens(timeline, [first_token_s + 0.1, first_token_s + 0.5])
    assert timeline.tpot_s == pytest.approx(0.25)
    assert timeline.itl.count == 2
    assert timeline.itl.total == pytest.approx(0.5)
    assert timeline.itl.max_value == pytest.approx(0.4)


def test_tokens_that_come_together_are_one_gap_and_then_none() -> None:
    timeline = make_timeline()
    first_token_s = timeline.first_token_s
    assert first_token_s is not None
    add_tokens(timeline, [first_token_s + 0.3], num_tokens=3)
    assert timeline.num_output_tokens == 4
    assert timeline.itl.count == 3
    assert timeline.itl.max_value == pytest.approx(0.3)
    assert timeline.tpot_s == pytest.approx(0.1)


def test_choices_are_counted_apart() -> None:
    timeline = make_timeline()
    first_token_s = timeline.first_token_s
    assert first_token_s is not None
    add_tokens(timeline, [first_token_s, first_token_s + 0.1], index=1)
    add_tokens(timeline, [first_token_s + 0.3])
    assert timeline.num_output_tokens_per_choice == [2, 2]
    assert timeline.tpot_s == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("slow_part", "cause"),
    [
        ("tokenize_s", Cause.TOKENIZE),
        ("admission_s", Cause.ADMISSION),
        ("queue_s", Cause.QUEUE),
        ("hop_s", Cause.DISPATCH),
        ("hop_back_s", Cause.DISPATCH),
        ("batch_wait_s", Cause.BATCH_WAIT),
        ("own_prefill_s", Cause.OWN_PREFILL),
        ("interference_s", Cause.LONG_NEIGHBOURS),
    ],
)
def test_the_main_cause_is_the_slowest_part(slow_part: str, cause: Cause) -> None:
    slow: dict[str, Any] = {slow_part: 5.0}
    assert make_timeline(**slow).main_cause() is cause


def test_interference_after_losing_its_blocks_is_eviction() -> None:
    assert make_timeline(interference_s=5.0, num_preemptions=1).main_cause() is Cause.EVICTION


def test_a_preemption_after_the_first_token_does_not_explain_the_ttft() -> None:
    timeline = make_timeline(interference_s=5.0)
    timeline.on_output(RequestOutput("request-1", 0, [7], 200.0, num_preemptions=2), 200.0)
    assert timeline.main_cause() is Cause.LONG_NEIGHBOURS
    assert timeline.num_preemptions == 2


def test_a_request_that_expires_at_the_gate_has_a_queue_time_and_a_cause_but_no_ttft() -> None:
    timeline = Timeline("request-1", 10.0, tokenized_s=10.1, queued_s=10.1)
    timeline.finish("queue_timeout", 14.1)
    assert timeline.ttft_s is None and timeline.ttft_parts() is None and timeline.tpot_s is None
    assert timeline.queue_s == pytest.approx(4.0)
    assert timeline.e2e_s == pytest.approx(4.1)
    assert timeline.main_cause() is Cause.QUEUE


def test_a_request_under_way_is_explained_up_to_now() -> None:
    timeline = Timeline("request-1", 10.0)
    assert timeline.main_cause(11.0) is Cause.TOKENIZE
    timeline.tokenized_s = timeline.queued_s = 11.0
    timeline.dispatched_s = 11.5
    assert timeline.main_cause(11.6) is Cause.TOKENIZE
    assert timeline.main_cause(20.0) is Cause.WORKER
    assert timeline.as_dict(20.0)["age_s"] == 10.0
    assert timeline.as_dict(20.0)["ttft_parts_s"] is None


def test_only_the_first_end_counts() -> None:
    timeline = make_timeline()
    timeline.finish("stop", 101.0)
    timeline.finish("cancelled", 102.0)
    assert (timeline.outcome, timeline.finished_s) == ("stop", 101.0)


def test_an_end_without_a_token_is_not_an_output() -> None:
    timeline = Timeline("request-1", 10.0)
    timeline.on_output(RequestOutput("request-1", 0, [], 11.0, finish_reason=FinishReason.ABORT), 11.0)
    assert timeline.first_output_s is None and timeline.num_output_tokens == 0
