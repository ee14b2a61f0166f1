"""Steps booked together give exactly what steps one by one give: every outcome, every time, every block."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.config import CacheConfig, Config, GateConfig, SchedulerConfig, TierConfig
from tidegate.cost_model import StepCost
from tidegate.executor.base import ExecutorInfo
from tidegate.request import Request, SamplingParams
from tidegate.sim.simulator import SimArrival, Simulator

COST = StepCost(0.004, 0.0007, 0.0001, 1e-7)


def info(num_blocks: int, block_size: int = 4) -> ExecutorInfo:
    return ExecutorInfo("sim", "0" * 64, "none", "u8", "none", block_size, num_blocks, 1, 1000, 4096)


def traffic(seed: int, count: int, rate: float, *, tiers: bool = False, sessions: bool = False) -> list[SimArrival]:
    """Shared prefixes, clients that hang up, answers that are cut off by their cap."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(1000) for _ in range(rng.randint(1, 30))] for _ in range(3)]
    arrivals = []
    time_s = 0.0
    for i in range(count):
        time_s += rng.expovariate(rate)
        prompt = rng.choice(prefixes) + [rng.randrange(1000) for _ in range(rng.randint(1, 60))]
        max_tokens = rng.randint(1, 90)
        request = Request(
            request_id=f"r{i}",
            prompt_token_ids=prompt,
            params=SamplingParams(ignore_eos=True),
            max_tokens=max_tokens,
            seed=i,
            arrival_s=time_s,
            tier=rng.choice(["priority", "default", "flex"]) if tiers else "default",
            session_id=f"s{rng.randrange(8)}" if sessions else "",
            session_ttl_s=rng.choice([0.05, 0.5, None]) if sessions else None,
        )
        arrivals.append(SimArrival(request, rng.randint(1, max_tokens) if rng.random() < 0.3 else None))
    return arrivals


def served(config: Config, arrivals: list[SimArrival], num_workers: int, num_blocks: int, ahead: int) -> Any:
    simulator = Simulator(config, info(num_blocks), COST, num_workers=num_workers, ahead_limit=ahead)
    outcomes = simulator.run(arrivals)
    for worker in simulator.workers.values():
        worker.engine.audit()
    engines = [
        (
            worker.num_steps,
            worker.num_tokens,
            worker.busy_s,
            worker.engine.scheduler.stats,
            worker.engine.pool.stats,
            worker.engine.pool.free_block_ids(),
            worker.engine.cost_model.cost,
        )
        for worker in simulator.workers.values()
    ]
    seen = [
        (one.request.request_id, one.outcome, one.token_times.tolist(), one.ended_s, one.num_output_tokens,
         one.num_cached_tokens, one.num_preemptions, one.worker_id, one.predicted_ttft_s, one.is_downgraded)
        for one in outcomes
    ]  # fmt: skip
    return (seen, engines), sum(worker.num_steps_ahead for worker in simulator.workers.values())


def check(config: Config, arrivals: list[SimArrival], num_workers: int = 1, num_blocks: int = 400) -> int:
    one_by_one, none = served(config, arrivals, num_workers, num_blocks, 0)
    together, num_ahead = served(config, arrivals, num_workers, num_blocks, 64)
    assert none == 0
    assert together == one_by_one
    return num_ahead


@pytest.mark.parametrize("admission", ["on", "observe", "off"])
@pytest.mark.parametrize("rate", [2.0, 20.0, 120.0])
def test_the_same_for_any_load_and_admission(admission: Any, rate: float):
    config = Config(gate=GateConfig(admission=admission), scheduler=SchedulerConfig(max_num_seqs=6))
    num_ahead = check(config, traffic(1, 80, rate), num_workers=3)
    assert num_ahead > 0


@pytest.mark.parametrize("eviction", ["lru", "lfu", "cost-aware"])
def test_the_same_where_blocks_are_short(eviction: Any):
    config = Config(
        gate=GateConfig(admission="off"),
        cache=CacheConfig(eviction=eviction),
        scheduler=SchedulerConfig(max_num_seqs=8),
    )
    assert check(config, traffic(2, 120, 60.0), num_blocks=90) > 0


def test_the_same_with_tiers_whose_requests_give_way():
    config = Config(gate=GateConfig(admission="off"), scheduler=SchedulerConfig(max_num_seqs=4))
    assert check(config, traffic(3, 100, 50.0, tiers=True)) > 0


def test_the_same_with_downgrades_and_short_objectives():
    tier = TierConfig(ttft_slo=0.1, tpot_slo=0.02, downgrade=("clamp:16", "tier:flex"))
    config = Config(tiers={"default": tier}, scheduler=SchedulerConfig(max_num_seqs=4))
    check(config, traffic(4, 120, 60.0), num_workers=2)


def test_the_same_with_conversations_that_expire():
    config = Config(gate=GateConfig(admission="off"), scheduler=SchedulerConfig(max_num_seqs=4))
    assert check(config, traffic(5, 120, 20.0, sessions=True), num_blocks=150) > 0


def test_the_same_without_a_prefix_cache():
    config = Config(cache=CacheConfig(enable_prefix_caching=False), scheduler=SchedulerConfig(max_num_seqs=4))
    assert check(config, traffic(6, 60, 20.0)) > 0


def test_most_steps_of_a_quiet_service_are_booked_together():
    config = Config(gate=GateConfig(admission="off"))
    arrivals = traffic(7, 60, 1.0)
    _, num_ahead = served(config, arrivals, 1, 400, 64)
    num_steps = served(config, arrivals, 1, 400, 0)[0][1][0][0]
    assert num_ahead > 0.6 * num_steps


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    rate=st.floats(1.0, 200.0),
    num_slots=st.integers(1, 9),
    num_blocks=st.integers(60, 300),
    num_workers=st.integers(1, 4),
    order=st.sampled_from(["deadline", "shortest-prefill", "fifo"]),
    step=st.sampled_from(["adaptive", "fixed"]),
    admission=st.sampled_from(["on", "off"]),
)
def test_the_same_for_random_traffic(
    seed: int, rate: float, num_slots: int, num_blocks: int, num_workers: int, order: Any, step: Any, admission: Any
):
    config = Config(
        gate=GateConfig(admission=admission, order=order),
        scheduler=SchedulerConfig(max_num_seqs=num_slots, max_num_batched_tokens=64, step=step),
    )
    check(config, traffic(seed, 40, rate, tiers=seed % 2 == 0, sessions=seed % 3 == 0), num_workers, num_blocks)
