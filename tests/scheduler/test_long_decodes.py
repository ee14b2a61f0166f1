"""Long answers give way to those that wait, go on in their turn, and produce what they would have produced alone."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest

from tests.engine_driver import EngineDriver, make_request, sim_info
from tests.gate.test_admission_in_simulation import asked
from tidegate.config import Config, GateConfig, SchedulerConfig
from tidegate.cost_model import StepCost
from tidegate.scheduler import long_decodes
from tidegate.sim.simulator import SimArrival, SimOutcome, Simulator


def driver(**changes: Any) -> EngineDriver:
    values: dict[str, Any] = {"num_blocks": 400, "max_num_seqs": 4, "max_num_batched_tokens": 64, "long_output": 20}
    return EngineDriver(**(values | changes))


@pytest.fixture(autouse=True)
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_decodes, "MIN_TURN", 8)


def is_over(one: EngineDriver, *names: str) -> bool:
    return all(one.reasons[name] for name in names)


def running(one: EngineDriver) -> set[str]:
    return {state.request.request_id for state in one.engine.scheduler.running_states()}


def test_long_answers_keep_all_slots_while_nobody_waits() -> None:
    one = driver()
    one.submit(*(make_request(f"long{i}", [i + 1] * 6, 60) for i in range(4)))
    one.run()
    assert one.engine.scheduler.long_decodes.num_pauses == 0


def test_long_answers_give_up_their_excess_over_half_of_the_slots_to_those_that_wait() -> None:
    one = driver()
    one.submit(*(make_request(f"long{i}", [i + 1] * 6, 200) for i in range(4)))
    for _ in range(40):
        one.step()
    one.submit(*(make_request(f"short{i}", [i + 9] * 6, 15) for i in range(4)))
    for _ in range(3):
        one.step()
    assert running(one) >= {"short0", "short1"}
    assert len(running(one)) == 4
    while not is_over(one, *(f"short{i}" for i in range(4))):
        one.step()
        assert sum(name.startswith("long") for name in running(one)) >= 2
    assert not any(is_over(one, f"long{i}") for i in range(4))
    for _ in range(3):
        one.step()
    assert running(one) == {f"long{i}" for i in range(4)}
    one.run()
    for i in range(4):
        alone = driver()
        alone.submit(make_request(f"long{i}", [i + 1] * 6, 200))
        alone.run()
        assert one.text(f"long{i}") == alone.text(f"long{i}")


def test_a_paused_answer_finds_its_blocks_again_and_computes_nothing_twice() -> None:
    one = driver()
    one.submit(*(make_request(f"long{i}", [i + 1] * 6, 100) for i in range(4)))
    for _ in range(30):
        one.step()
    one.submit(make_request("short", [9] * 6, 10))
    one.run()
    scheduler = one.engine.scheduler
    assert scheduler.long_decodes.num_pauses == 1
    assert scheduler.stats.num_replayed_tokens <= 1


def test_where_blocks_are_needed_a_paused_answer_is_computed_again() -> None:
    one = driver(num_blocks=56, max_num_seqs=2)
    one.submit(make_request("long0", [1] * 6, 90), make_request("long1", [2] * 6, 90))
    for _ in range(60):
        one.step()
    one.submit(make_request("short", [9] * 120, 10))
    one.run()
    scheduler = one.engine.scheduler
    assert scheduler.long_decodes.num_pauses >= 1
    assert scheduler.stats.num_replayed_tokens > 4
    assert all(len(one.text(f"long{i}")) == 90 for i in range(2))


def test_a_higher_tiers_long_answers_do_not_give_way_to_a_lower_tier() -> None:
    one = driver()
    one.submit(*(make_request(f"long{i}", [i + 1] * 6, 100, priority=0) for i in range(4)))
    for _ in range(40):
        one.step()
    one.submit(make_request("short", [9] * 6, 10, priority=1))
    for _ in range(20):
        one.step()
    assert one.engine.scheduler.long_decodes.num_pauses == 0


def test_a_paused_answer_can_be_cancelled() -> None:
    one = driver(max_num_seqs=2)
    one.submit(make_request("long0", [1] * 6, 100), make_request("long1", [2] * 6, 100))
    for _ in range(40):
        one.step()
    one.submit(make_request("short", [9] * 6, 10))
    one.step()
    (paused,) = {"long0", "long1"} - running(one)
    one.cancel(paused)
    one.run()
    assert one.engine.pool.num_held == 0


def test_no_paused_answer_starves_under_an_endless_line_of_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_decodes, "MAX_PAUSE_S", 0.5)
    one = driver()
    one.submit(*(make_request(f"long{i}", [i + 1] * 6, 120) for i in range(4)))
    num_sent = 0
    while not is_over(one, *(f"long{i}" for i in range(4))):
        if len(one.engine.scheduler.waiting) < 4:
            one.submit(make_request(f"short{num_sent}", [9 + num_sent % 50] * 6, 10))
            num_sent += 1
        one.step()
        assert one.num_steps < 1_000
    assert one.engine.scheduler.long_decodes.num_pauses > 2


def served(share: float, *, ahead_limit: int = 256) -> tuple[list[SimOutcome], list[SimOutcome]]:
    """12 answers of 1,500 tokens on 8 slots, and a short request each second from the tenth on."""
    arrivals: list[SimArrival] = [asked(f"long{i}", 0.01 * i, 64, 1_500) for i in range(12)]
    arrivals += [asked(f"short{i}", 10.0 + i, 100, 24) for i in range(30)]
    config = Config(
        gate=GateConfig(admission="off"), scheduler=SchedulerConfig(max_num_seqs=8, max_long_decode_share=share)
    )
    outcomes = Simulator(config, sim_info(2_000, 32), StepCost(), ahead_limit=ahead_limit).run(arrivals)
    return outcomes[:12], outcomes[12:]


def test_short_requests_keep_their_first_token_among_long_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    never_long, never_short = served(1.0)
    long, short = served(0.5)
    assert all(outcome.outcome == "length" for outcome in (*long, *short))
    assert median(one.ttft_s or 0.0 for one in short) < 0.2 * median(one.ttft_s or 0.0 for one in never_short)
    assert max(one.ended_s or 0.0 for one in long) < 1.1 * max(one.ended_s or 0.0 for one in never_long)


def test_booking_equal_steps_together_changes_nothing_where_answers_take_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    together, one_by_one = served(0.5), served(0.5, ahead_limit=0)
    for ours, theirs in zip((*together[0], *together[1]), (*one_by_one[0], *one_by_one[1]), strict=True):
        assert (ours.first_token_s, ours.ended_s) == (theirs.first_token_s, theirs.ended_s)
