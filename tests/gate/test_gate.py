"""The gate as a state machine: what each verb returns."""

from __future__ import annotations

from typing import Any

from tests.engine_driver import make_request
from tidegate.config import Config, GateConfig
from tidegate.gate.effects import CancelAtWorker, Deliver, Dispatch, Refuse
from tidegate.gate.gate import Gate
from tidegate.metrics.load_snapshot import LoadReport, StepStats
from tidegate.request import FinishReason, RequestOutput, SamplingParams
from tidegate.worker.messages import StepReport, WorkerInfo


def worker(worker_id: str = "w0", incarnation: str = "i0", **changes: Any) -> WorkerInfo:
    values: dict[str, Any] = {
        "worker_id": worker_id,
        "incarnation": incarnation,
        "pid": 1,
        "version": "0",
        "protocol_version": 1,
        "model": "m",
        "weight_digest": "d",
        "weight_format": "f",
        "kv_cache_dtype": "u8",
        "compute_dtype": "bf16",
        "block_size": 4,
        "num_blocks": 64,
        "bytes_per_block": 1,
        "vocab_size": 1000,
        "max_model_len": 128,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 16,
    }
    return WorkerInfo(**(values | changes))


def load(**changes: int) -> LoadReport:
    values: dict[str, Any] = dict.fromkeys(LoadReport.__struct_fields__, 0)
    return LoadReport(**(values | changes))


def report(*outputs: RequestOutput, incarnation: str = "i0", **changes: int) -> StepReport:
    return StepReport(incarnation, list(outputs), load(**changes), StepStats(1, 0.0, 0.02, 0.02, 0, 1, 1, 0, 0))


def ended(request_id: str, reason: FinishReason = FinishReason.STOP, index: int = 0) -> RequestOutput:
    return RequestOutput(request_id, index, [1], 0.0, reason)


def requests(*ids: str, **changes: Any) -> list[Any]:
    return [make_request(request_id, [1, 2, 3], **changes) for request_id in ids]


def dispatched(effects: list[Any]) -> list[str]:
    return [effect.request.request_id for effect in effects if isinstance(effect, Dispatch)]


def bare_gate(**config: Any) -> Gate:
    """A gate that keeps its bounds but predicts nothing."""
    return Gate(Config(gate=GateConfig(admission="off", **config)))


def ready_gate(**config: Any) -> Gate:
    gate = bare_gate(**config)
    gate.worker_ready(worker(), 0.0)
    return gate


def test_a_worker_gets_its_slots_and_a_short_look_ahead_and_the_rest_waits_here():
    gate = ready_gate()
    sent = [dispatched(gate.submit(request, 0.0)) for request in requests(*"abcdefgh")]
    num_sent = sum(map(len, sent))
    assert 3 <= num_sent <= 4
    assert gate.num_waiting == 8 - num_sent


def test_an_end_makes_room_for_the_next_in_order():
    gate = ready_gate()
    for request in requests(*"abcdefgh"):
        gate.submit(request, 0.0)
    first_waiting = "abcdefgh"[8 - gate.num_waiting]
    effects = gate.handle_report("w0", report(ended("a")), 0.1)
    assert effects[0] == Deliver("a", [ended("a")])
    assert dispatched(effects) == [first_waiting]


def test_what_waits_inside_the_worker_for_blocks_lowers_what_it_is_sent():
    gate = bare_gate()
    gate.worker_ready(worker(max_num_seqs=8), 0.0)
    gate.submit(*requests("a"), 0.0)
    gate.handle_report("w0", report(num_running=1, num_waiting=1), 0.0)
    sent = [dispatched(gate.submit(request, 0.0)) for request in requests(*"bcdefgh")]
    assert sum(map(len, sent)) <= 2


def test_more_urgent_requests_go_first():
    gate = ready_gate()
    for request in requests(*"abcd"):
        gate.submit(request, 0.0)
    gate.submit(make_request("late", [1], tier="flex"), 0.0)
    order = dispatched(gate.submit(make_request("urgent", [1], tier="priority"), 0.0))
    for request_id in "abcd":
        order += dispatched(gate.handle_report("w0", report(ended(request_id)), 0.1))
    assert order.index("urgent") < order.index("late")


def test_queue_bounds_are_refused_at_once_and_expiry_with_an_answer():
    gate = ready_gate(max_queued=1, queue_timeout=5)
    effects = [effect for request in requests(*"abcdef") for effect in gate.submit(request, 1.0)]
    refused = [effect for effect in effects if isinstance(effect, Refuse)]
    assert {effect.outcome for effect in refused} == {"queue_full"}
    assert gate.next_deadline() == 6.0
    assert gate.tick(5.9) == []
    assert [effect.outcome for effect in gate.tick(6.0)] == ["queue_timeout"]
    assert gate.num_waiting == 0
    assert gate.next_deadline() is None


def test_a_request_that_can_never_fit_is_refused_with_its_numbers():
    gate = ready_gate()
    (effect,) = gate.submit(make_request("r", [1] * 100, max_tokens=29), 0.0)
    assert effect.outcome == "never_fits"
    assert "129" in effect.message and "128" in effect.message
    assert dispatched(gate.submit(make_request("fits", [1] * 100, max_tokens=28), 0.0)) == ["fits"]


def test_nothing_is_taken_without_a_worker_or_while_draining():
    gate = bare_gate()
    assert gate.submit(*requests("a"), 0.0)[0].outcome == "no_workers"
    gate.worker_ready(worker(), 0.0)
    gate.drain(0.0)
    assert gate.submit(*requests("b"), 0.0)[0].outcome == "draining"


def test_a_cancelled_request_gets_nothing_more_and_counts_until_its_worker_confirms():
    gate = ready_gate()
    gate.submit(*requests("a"), 0.0)
    assert gate.cancel("a", 0.0) == [CancelAtWorker("w0", "a")]
    assert gate.cancel("a", 0.0) == []
    assert gate.num_dispatched == 1
    assert gate.handle_report("w0", report(ended("a", FinishReason.ABORT)), 0.1) == []
    assert gate.num_dispatched == 0


def test_cancel_in_the_queue_is_silent():
    gate = ready_gate()
    for request in requests(*"abcdefgh"):
        gate.submit(request, 0.0)
    before = gate.num_waiting
    assert gate.cancel("h", 0.0) == []
    assert gate.num_waiting == before - 1


def test_choices_end_one_by_one():
    gate = ready_gate()
    gate.submit(make_request("r", [1], params=SamplingParams(n=2)), 0.0)
    gate.handle_report("w0", report(ended("r", index=1)), 0.0)
    assert gate.num_dispatched == 1
    gate.handle_report("w0", report(ended("r", index=0)), 0.0)
    assert gate.num_dispatched == 0


def test_reports_of_another_incarnation_are_dropped():
    gate = ready_gate()
    gate.submit(*requests("a"), 0.0)
    assert gate.handle_report("w0", report(ended("a"), incarnation="old"), 0.0) == []
    assert gate.num_dispatched == 1


def test_a_lost_worker_returns_what_it_had_not_begun_to_its_old_place():
    gate = ready_gate()
    for request in requests(*"abcdef"):
        gate.submit(request, 0.0)
    gate.handle_report("w0", report(RequestOutput("a", 0, [1], 0.0)), 0.0)
    gate.cancel("b", 0.0)
    effects = gate.worker_lost("w0", 1.0)
    assert [(effect.request_id, effect.outcome) for effect in effects] == [("a", "worker_failed")]
    again = gate.worker_ready(worker(incarnation="i1"), 2.0)
    assert dispatched(again)[:2] == ["c", "d"]


def test_the_look_ahead_grows_with_the_ends_per_step():
    gate = bare_gate()
    gate.worker_ready(worker(max_num_seqs=16), 0.0)
    before = gate.snapshot(0.0).num_free_places
    for _ in range(200):
        gate.handle_report("w0", report(*[ended("x")] * 4), 0.0)
    assert gate.snapshot(0.0).num_free_places > before
