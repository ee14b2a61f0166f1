"""The rules at the door, one by one, with predictions given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.engine_driver import make_request
from tidegate.admission.controller import Prediction, Verdict, decide
from tidegate.admission.decision import Admit, Downgrade, Queue, Reject
from tidegate.config import GateConfig, TierConfig
from tidegate.metrics.load_snapshot import LoadSnapshot
from tidegate.request import Request

Predict = Callable[[Request], Prediction]
TIERS = {"default": TierConfig(), "flex": TierConfig(rank=2, ttft_slo=60.0, tpot_slo=0.5)}
GOOD = Prediction(ttft_s=0.5, tpot_s=0.05, expected_output=100.0)


def snapshot(**changes: Any) -> LoadSnapshot:
    values: dict[str, Any] = {
        "num_queued": 0,
        "num_free_places": 1,
        "num_workers": 1,
        "max_request_tokens": 1000,
        "is_draining": False,
    }
    return LoadSnapshot(**(values | changes))


def request(num_tokens: int = 100, max_tokens: int = 100, **changes: Any) -> Request:
    return make_request("r", [1] * num_tokens, max_tokens, **({"ttft_slo_s": 2.0, "tpot_slo_s": 0.15} | changes))


def decided(
    predict: Prediction | Predict = GOOD, *, load: LoadSnapshot | None = None, tier: TierConfig | None = None,
    asked: Request | None = None, **config: Any,
) -> Verdict:  # fmt: skip
    tiers = TIERS if tier is None else TIERS | {"default": tier}
    predicted: Predict = (lambda _: predict) if isinstance(predict, Prediction) else predict
    return decide(asked or request(), load or snapshot(), tiers, GateConfig(**config), predicted)


def worse(**changes: Any) -> Prediction:
    values: dict[str, Any] = {"ttft_s": 0.5, "tpot_s": 0.05, "expected_output": 100.0, "kind": (False, True)}
    return Prediction(**(values | changes))


def test_what_a_worker_can_take_is_admitted_and_what_must_wait_is_queued() -> None:
    assert isinstance(decided().decision, Admit)
    decision = decided(worse(has_place=False)).decision
    assert isinstance(decision, Queue)
    assert decision.numbers["predicted_ttft_ms"] == 500.0


@pytest.mark.parametrize(
    ("load", "reason", "retries"),
    [
        (snapshot(is_draining=True), "draining", False),
        (snapshot(num_workers=0), "no_workers", False),
        (snapshot(max_request_tokens=199), "never_fits", False),
    ],
)
def test_what_nobody_can_serve_is_refused_without_a_prediction(load: LoadSnapshot, reason: str, retries: bool) -> None:
    def predict(_: Request) -> Prediction:
        raise AssertionError("there is nothing to predict")

    decision = decided(predict, load=load).decision
    assert isinstance(decision, Reject)
    assert decision.reason == reason
    assert (decision.retry_after_s is not None) is retries


@pytest.mark.parametrize(
    ("prediction", "load", "reason"),
    [
        (worse(ttft_s=1.9), snapshot(), "ttft_unreachable"),
        (worse(tpot_s=0.2), snapshot(), "tpot_unreachable"),
        (worse(harmed=1), snapshot(), "others_ttft"),
        (worse(has_place=False), snapshot(num_queued=64, queued_by_tier={"default": 64}), "queue_full"),
        (worse(has_place=False), snapshot(num_queued=1024), "queue_full"),
    ],
)
def test_a_promise_that_cannot_be_kept_is_refused_with_its_reason_and_when_to_come_back(
    prediction: Prediction, load: LoadSnapshot, reason: str
) -> None:
    decision = decided(prediction, load=load).decision
    assert isinstance(decision, Reject)
    assert decision.reason == reason
    assert decision.retry_after_s is not None
    assert decision.retry_after_s >= 0.75
    assert "predicted_ttft_ms" in decision.numbers


def test_a_full_queue_of_another_tier_is_none_of_its_business() -> None:
    load = snapshot(num_queued=64, queued_by_tier={"flex": 64})
    assert isinstance(decided(worse(has_place=False), load=load).decision, Queue)


def test_without_objectives_nothing_is_unreachable() -> None:
    asked = request(ttft_slo_s=None, tpot_slo_s=None)
    assert isinstance(decided(worse(ttft_s=1e6, tpot_s=1e3), asked=asked).decision, Admit)


def test_downgrades_are_tried_in_the_tiers_order_until_one_helps() -> None:
    seen: list[tuple[str, int]] = []

    def predict(asked: Request) -> Prediction:
        seen.append((asked.tier, asked.max_tokens))
        return worse(ttft_s=10.0)  # within flex' objective alone

    tier = TierConfig(downgrade=("clamp:64", "clamp:16", "tier:flex"))
    verdict = decided(predict, tier=tier)
    assert seen == [("default", 100), ("default", 64), ("default", 16), ("flex", 16)]
    assert isinstance(verdict.decision, Downgrade)
    assert verdict.decision.changes == ("clamp:64", "clamp:16", "tier:flex")
    served = verdict.request
    assert (served.tier, served.priority, served.max_tokens, served.ttft_slo_s) == ("flex", 2, 16, 60.0)


def test_a_downgrade_that_helps_ends_the_search() -> None:
    tier = TierConfig(downgrade=("clamp:64", "tier:flex"))
    verdict = decided(lambda asked: worse(tpot_s=0.2 if asked.max_tokens > 64 else 0.1), tier=tier)
    assert isinstance(verdict.decision, Downgrade)
    assert (verdict.decision.reason, verdict.decision.changes) == ("tpot_unreachable", ("clamp:64",))
    assert (verdict.request.tier, verdict.request.max_tokens) == ("default", 64)


def test_when_no_downgrade_helps_the_request_is_refused_as_it_came() -> None:
    verdict = decided(worse(ttft_s=100.0), tier=TierConfig(downgrade=("clamp:64", "tier:flex")))
    assert isinstance(verdict.decision, Reject)
    assert verdict.decision.reason == "ttft_unreachable"
    assert (verdict.request.tier, verdict.request.max_tokens) == ("default", 100)


@pytest.mark.parametrize(
    ("limits", "reason"),
    [({"max_prompt_tokens": 99}, "long_prompt"), ({"max_expected_output": 99}, "long_output")],
)
def test_what_is_long_is_downgraded_where_that_is_wished_and_never_refused(
    limits: dict[str, int], reason: str
) -> None:
    helped = decided(tier=TierConfig(downgrade=("clamp:64",), **limits)).decision
    assert isinstance(helped, Downgrade)
    assert helped.reason == reason
    assert isinstance(decided(tier=TierConfig(**limits)).decision, Admit)


def test_off_looks_at_the_queues_bound_alone() -> None:
    bad = worse(ttft_s=100.0, tpot_s=9.0, harmed=5)
    assert isinstance(decided(bad, admission="off").decision, Admit)
    waiting = decided(bad, load=snapshot(num_free_places=0, num_queued=5), admission="off")
    assert isinstance(waiting.decision, Queue)
    full = decided(bad, load=snapshot(num_free_places=0, num_queued=5), admission="off", max_queued=5).decision
    assert isinstance(full, Reject)
    assert full.reason == "queue_full"


def test_times_to_come_back_are_spread_and_the_same_for_the_same_request() -> None:
    def retry_after(request_id: str) -> float:
        asked = make_request(request_id, [1], 1, ttft_slo_s=2.0)
        decision = decided(worse(ttft_s=12.0), asked=asked).decision
        assert isinstance(decision, Reject)
        assert decision.retry_after_s is not None
        return decision.retry_after_s

    times = [retry_after(f"r{i}") for i in range(200)]
    assert 7.5 <= min(times) < 8.5
    assert 11.5 < max(times) <= 12.5
    assert times[0] == retry_after("r0")


def test_a_prompt_too_long_for_its_objective_is_served_late_where_nobody_else_is_in_the_way() -> None:
    alone = worse(ttft_s=5.0, kind=(True, False))
    decision = decided(alone).decision
    assert isinstance(decision, Admit)
    assert decision.reason == "own_length"
    assert isinstance(decided(alone, asked=request(ttft_slo_s=1.0)).decision, Reject)  # its own wish, not its tier's
    for crowded in (snapshot(num_queued=1), snapshot(long_share=0.2)):
        assert isinstance(decided(alone, load=crowded).decision, Reject)
    assert isinstance(decided(worse(ttft_s=5.0, kind=(True, False), harmed=1)).decision, Reject)


def test_a_downgrade_that_helps_comes_before_a_late_answer() -> None:
    def predict(asked: Request) -> Prediction:
        return worse(ttft_s=5.0, kind=(True, False))

    decision = decided(predict, tier=TierConfig(downgrade=("tier:flex",))).decision
    assert isinstance(decision, Downgrade)


def test_a_pace_that_the_machine_could_not_keep_even_alone_is_no_reason_to_refuse() -> None:
    assert isinstance(decided(worse(tpot_s=0.2, tpot_alone_s=0.16)).decision, Admit)
    assert isinstance(decided(worse(tpot_s=0.2, tpot_alone_s=0.15)).decision, Reject)
