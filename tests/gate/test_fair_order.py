"""Tenants at the gate: whose turn it is, whose slots are borrowed, and that one's load does not keep another out."""

from __future__ import annotations

from typing import Any

from tests.engine_driver import make_request
from tests.gate.test_gate import dispatched, ended, report, worker
from tidegate.bench.tenants import backlogged, noisy_and_quiet
from tidegate.config import Config, GateConfig, TenantConfig
from tidegate.gate.effects import Refuse
from tidegate.gate.gate import Gate
from tidegate.request import Request


def fair_gate(*, max_num_seqs: int = 4, gate: dict[str, Any] | None = None, **weights: float) -> Gate:
    settings: dict[str, Any] = {"admission": "off", **(gate or {})}
    config = Config(
        tenants={name: TenantConfig(weight=weight) for name, weight in weights.items()}, gate=GateConfig(**settings)
    )
    gated = Gate(config)
    gated.worker_ready(worker(max_num_seqs=max_num_seqs, max_num_batched_tokens=1000), 0.0)
    return gated


def of(tenant: str, number: int, **changes: Any) -> Request:
    return make_request(f"{tenant}{number}", [1] * 8, tenant=tenant, **changes)


def fill(gate: Gate, tenant: str, count: int) -> list[str]:
    return [name for i in range(count) for name in dispatched(gate.submit(of(tenant, i), 0.0))]


def test_with_tenants_turns_are_taken_and_without_them_none_are() -> None:
    gate = fair_gate(a=1.0, b=1.0, gate={"fair_slots": "turns"})
    sent = fill(gate, "a", 12)
    fill(gate, "b", 3)
    order = []
    for name in sent:
        order += dispatched(gate.handle_report("w0", report(ended(name)), 1.0))
    assert order[:2] == ["b0", "b1"], "a has had service, b none"


def test_what_is_within_a_tenants_share_takes_the_place_of_what_is_borrowed() -> None:
    gate = fair_gate(a=1.0, b=1.0)
    sent = {
        effect.request.request_id: effect.request
        for i in range(12)
        for effect in gate.submit(of("a", i), 0.0)
        if hasattr(effect, "worker_id")
    }
    assert [request.is_borrowing for request in sent.values()][:4] == [False, False, True, True]
    later = [effect for i in range(4) for effect in gate.submit(of("b", i), 0.0) if hasattr(effect, "worker_id")]
    assert [(effect.request.request_id, effect.request.is_borrowing) for effect in later] == [
        ("b0", False),
        ("b1", False),
    ]


def test_a_full_queue_of_one_tenant_does_not_refuse_another() -> None:
    gate = fair_gate(a=1.0, b=1.0, gate={"max_queued": 10})
    refused = [effect for i in range(40) for effect in gate.submit(of("a", i), 0.0) if isinstance(effect, Refuse)]
    assert refused
    assert "b" not in refused[0].message
    assert not any(isinstance(effect, Refuse) for i in range(4) for effect in gate.submit(of("b", i), 0.0))


def test_every_request_is_served_once_and_nothing_is_left_in_the_books() -> None:
    gate = fair_gate(a=3.0, b=1.0, c=1.0)
    sent = [
        name
        for i in range(20)
        for t in "abc"
        for name in dispatched(gate.submit(of(t, i, tier="flex" if i % 3 else "default"), 0.0))
    ]
    gate.cancel("a19", 0.5)
    for name in sent:
        sent += dispatched(gate.handle_report("w0", report(ended(name)), 1.0))
    assert len(sent) == len(set(sent)) == 59
    assert gate.num_waiting == gate.num_dispatched == 0
    fair = gate._fair
    assert fair is not None
    assert not any(fair._num_waiting.values()) and not any(fair._num_slots.values())


def test_requests_that_age_and_workers_that_end_leave_the_turns_whole() -> None:
    gate = fair_gate(a=1.0, b=1.0)
    for i in range(10):
        gate.submit(of("a", i, tier="flex"), 0.0)
        gate.submit(of("b", i, tier="default"), 0.0)
    gate.tick(40.0)
    gate.worker_lost("w0", 41.0)
    assert gate.num_waiting == 20
    sent = dispatched(gate.worker_ready(worker("w1", "i1", max_num_seqs=4), 42.0))
    for name in sent:
        sent += dispatched(gate.handle_report("w1", report(ended(name), incarnation="i1"), 43.0))
    assert len(set(sent)) == 20


def test_a_noisy_tenant_leaves_a_quiet_one_its_objectives_and_the_machine_its_work() -> None:
    figures = noisy_and_quiet("preempt", num_quiet=80)
    assert figures["quiet_p95_ttft_s"] <= 1.5 * figures["alone_p95_ttft_s"] + figures["step_s"]
    assert figures["quiet_goodput"] >= 0.95
    assert figures["total_of_noisy_alone"] >= 0.93


def test_backlogged_tenants_get_tokens_by_weight_and_marking_all_priority_gains_nothing() -> None:
    assert abs(backlogged(3.0)["ratio"] / 3.0 - 1.0) <= 0.05
    assert backlogged(1.0, budget=1_000)["share_of_other"] >= 0.45
