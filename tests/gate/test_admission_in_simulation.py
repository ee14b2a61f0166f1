"""Admission, tiers and pacing under load, in simulated time: the gate, engines and caches are the real ones."""

from __future__ import annotations

import random
from dataclasses import astuple
from statistics import median
from typing import Any

import pytest

from tests.engine_driver import make_request, sim_info
from tests.gate.test_gate import dispatched, report, worker
from tidegate.config import Config, GateConfig, SchedulerConfig, TierConfig
from tidegate.cost_model import StepCost
from tidegate.gate.gate import Gate
from tidegate.request import Request, RequestOutput, SamplingParams
from tidegate.sim.simulator import SimArrival, SimOutcome, Simulator

COST = StepCost()


def asked(
    name: str, arrival_s: float, num_tokens: int, max_tokens: int, seed: int = 0, **changes: Any
) -> SimArrival:  # fmt: skip
    rng = random.Random(name)
    request: Request = make_request(
        name,
        [rng.randrange(1000) for _ in range(num_tokens)],
        max_tokens,
        params=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        seed=seed,
        **changes,
    )
    request.arrival_s = arrival_s
    return SimArrival(request)


def poisson(rate: float, count: int, seed: int, **changes: Any) -> list[SimArrival]:
    """Prompts of 64-512 tokens, answers of 16-128; about 3.5 a second are what one worker serves."""
    rng = random.Random(seed)
    time_s = 0.0
    arrivals = []
    for i in range(count):
        time_s += rng.expovariate(rate)
        arrivals.append(asked(f"{seed}-{i}", time_s, rng.randint(64, 512), rng.randint(16, 128), **changes))
    return arrivals


def simulated(
    arrivals: list[SimArrival], *, tiers: dict[str, TierConfig] | None = None, num_slots: int = 16, **gate: Any
) -> tuple[dict[str, SimOutcome], Simulator]:
    scheduler = SchedulerConfig(max_num_seqs=num_slots)
    config = Config(gate=GateConfig(**gate), scheduler=scheduler, **({"tiers": tiers} if tiers else {}))
    simulator = Simulator(config, sim_info(2_000, 32), COST)
    outcomes = simulator.run(sorted(arrivals, key=lambda arrival: arrival.request.arrival_s))
    return {outcome.request.request_id: outcome for outcome in outcomes}, simulator


def ttft(outcome: SimOutcome) -> float:
    assert outcome.ttft_s is not None, f"{outcome.request.request_id}: {outcome.outcome}"
    return outcome.ttft_s


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(("rate", "admission"), [(2.0, "observe"), (3.0, "observe"), (7.0, "on")])
def test_predicted_first_tokens_come_when_they_were_predicted(rate: float, admission: str, seed: int) -> None:
    _, simulator = simulated(poisson(rate, 200, seed), admission=admission, max_queued=10_000)
    errors = sorted(abs(predicted - actual) / actual for _, predicted, actual in simulator.gate.judged)
    assert len(errors) >= 60
    assert median(errors) <= 0.15
    assert errors[int(0.9 * len(errors))] <= 0.4


def test_under_overload_those_who_are_served_are_served_in_time_and_the_others_know_before() -> None:
    outcomes, _ = simulated(poisson(8.0, 300, 5))
    served = [outcome for outcome in outcomes.values() if outcome.outcome == "length"]
    refused = [outcome for outcome in outcomes.values() if outcome.outcome != "length"]
    assert len(served) + len(refused) == 300
    assert min(len(served), len(refused)) > 60
    assert sum(ttft(outcome) <= 2.0 for outcome in served) >= 0.95 * len(served)
    for outcome in refused:
        assert outcome.ended_s is not None
        assert outcome.ended_s - outcome.request.arrival_s < 2.0
        assert outcome.first_token_s is None


@pytest.mark.parametrize("slowness", [2, 8, 10, 12, 14, 20])
def test_an_idle_server_refuses_nobody_however_slow_it_seemed_at_its_start(slowness: int) -> None:
    cost = StepCost(*(slowness * part for part in astuple(COST)))
    lone = asked("lone", 0.0, 32, 8, ttft_slo_s=2.0, tpot_slo_s=0.15)
    [outcome] = Simulator(Config(), sim_info(2_000, 32), cost).run([lone])
    assert outcome.outcome == "length"


def test_observing_serves_exactly_what_no_admission_serves() -> None:
    def seen(admission: str) -> list[tuple[str, float | None, float | None]]:
        outcomes, _ = simulated(poisson(6.0, 150, 4), admission=admission)
        return [(one.outcome, one.first_token_s, one.ended_s) for one in outcomes.values()]

    assert seen("observe") == seen("off")


def test_a_lower_tier_is_served_at_last_whatever_comes_above_it() -> None:
    tiers = {
        "default": TierConfig(rank=1, ttft_slo=None, tpot_slo=None, max_queued=1000),
        "flex": TierConfig(rank=2, ttft_slo=None, tpot_slo=None, age_after=5.0),
    }
    flood = poisson(8.0, 400, 6)
    flex = asked("flex", 2.0, 100, 16, tier="flex")
    outcomes, _ = simulated([*flood, flex], tiers=tiers, order="fifo")
    last_s = max(ttft(outcome) + outcome.request.arrival_s for outcome in outcomes.values())
    assert outcomes["flex"].outcome == "length"
    # From 5 s on it stands among those that came when it did, and no longer behind all that come.
    came_later = [one for one in outcomes.values() if one.request.arrival_s > 10.0]
    assert len(came_later) > 100
    assert ttft(outcomes["flex"]) + 2.0 < median(ttft(one) + one.request.arrival_s for one in came_later) < last_s


def test_at_the_gate_a_higher_tier_goes_first() -> None:
    waiting = [asked(f"flex {i}", 0.001 * i, 100, 64, tier="flex") for i in range(30)]
    urgent = asked("urgent", 0.5, 100, 16, tier="priority")
    outcomes, _ = simulated([*waiting, urgent], num_slots=4)
    first = sorted((ttft(one) + one.request.arrival_s, name) for name, one in outcomes.items())
    assert [name for _, name in first].index("urgent") <= 6


def test_priority_takes_a_slot_from_running_flex_which_goes_on_later() -> None:
    running = [asked(f"flex {i}", 0.0, 64, 400, tier="flex") for i in range(4)]
    urgent = asked("urgent", 1.0, 64, 8, tier="priority")
    outcomes, simulator = simulated([*running, urgent], num_slots=4)
    assert ttft(outcomes["urgent"]) < 0.3
    assert simulator.workers["w0"].engine.scheduler.stats.num_preemptions >= 1
    assert all(one.outcome == "length" and one.num_output_tokens == 400 for n, one in outcomes.items() if n != "urgent")


def test_equals_take_no_slots_from_each_other() -> None:
    running = [asked(f"r{i}", 0.0, 64, 200) for i in range(4)]
    late = asked("late", 1.0, 64, 8, ttft_slo_s=60.0)
    outcomes, simulator = simulated([*running, late], num_slots=4)
    assert simulator.workers["w0"].engine.scheduler.stats.num_preemptions == 0
    assert ttft(outcomes["late"]) + 1.0 > min(one.ended_s or 0.0 for name, one in outcomes.items() if name != "late")


@pytest.mark.parametrize("bound", [1, 3])
def test_long_prefills_are_let_in_so_many_at_once(bound: int) -> None:
    """A long one joins a worker only when another has had its first token. Between them come short ones."""
    long = [asked(f"long {i}", 0.001 * i, 1_100, 8, ttft_slo_s=None) for i in range(6)]
    gate = Gate(Config(gate=GateConfig(max_long_prefills=bound, admission="off")))
    gate.worker_ready(worker(max_num_seqs=16, max_num_batched_tokens=4_096, max_model_len=4_096, num_blocks=2_000), 0.0)
    sent = [effect for arrival in long for effect in gate.submit(arrival.request, 0.0)]
    assert dispatched(sent) == [f"long {i}" for i in range(bound)]
    assert dispatched(gate.submit(asked("short", 0.01, 10, 8).request, 0.0)) == ["short"]
    more = gate.handle_report("w0", report(RequestOutput("long 0", 0, [1], 0.1)), 0.1)
    assert dispatched(more) == [f"long {bound}"]


def test_short_requests_keep_their_first_token_beside_long_ones() -> None:
    long = [asked(f"long {i}", 0.1 * i, 3_000, 32, tier="flex") for i in range(6)]
    short = [asked(f"short {i}", 0.5 + 0.4 * i, 100, 16) for i in range(20)]
    outcomes, _ = simulated([*long, *short])
    assert all(outcomes[f"short {i}"].outcome == "length" for i in range(20))
    assert max(ttft(outcomes[f"short {i}"]) for i in range(20)) < 2.0


def test_running_answers_keep_their_pace_while_prompts_are_taken_in() -> None:
    running = [asked(f"r{i}", 0.0, 64, 200, tpot_slo_s=0.03) for i in range(4)]
    prompts = [asked(f"p{i}", 1.0 + 0.2 * i, 500, 1, ttft_slo_s=None, tier="flex") for i in range(20)]
    outcomes, _ = simulated([*running, *prompts], admission="off")
    for i in range(4):
        tpot_s = outcomes[f"r{i}"].tpot_s
        assert tpot_s is not None
        assert tpot_s <= 0.03
    assert all(outcomes[f"p{i}"].outcome == "length" for i in range(20))


def test_prefill_keeps_a_floor_where_no_pace_can_be_kept() -> None:
    running = [asked(f"r{i}", 0.0, 64, 500, tpot_slo_s=0.001) for i in range(4)]
    prompt = asked("p", 1.0, 320, 1)
    outcomes, _ = simulated([*running, prompt], admission="off")
    step_s = COST.base_s + 5 * COST.decode_row_s + 16 * COST.prefill_token_s
    assert ttft(outcomes["p"]) < 1.3 * (320 / 16) * step_s
