"""Who gives way, and what becomes of them: each clause of the promise."""

from __future__ import annotations

import random

import pytest

from tests.engine_driver import EngineDriver, make_request
from tidegate.bench.preemption import KINDS, Clients, blocks_for_ten, run, workload
from tidegate.kv.sessions import BlockUser
from tidegate.scheduler.preemption import choose_victim
from tidegate.scheduler.state import RequestState

B = 4


def _state(row_id: int, *, priority: int = 0, num_preemptions: int = 0, num_since_resume: int = 0) -> RequestState:
    request = make_request(f"r{row_id}", [1, 2, 3], priority=priority)
    state = RequestState(request, 0, row_id, row_id, b"", BlockUser(request.request_id), 0.0)
    state.num_preemptions, state.num_since_resume = num_preemptions, num_since_resume
    return state


def _crowded(**changes) -> EngineDriver:
    """Room for far less than what runs, and an engine that does not foresee it."""
    driver = EngineDriver(
        **({"num_blocks": 14, "block_size": B, "max_num_seqs": 6, "max_num_batched_tokens": 64} | changes)
    )
    driver.engine.scheduler.output_length.observe(1)
    return driver


def _spied(driver: EngineDriver) -> list[tuple[str, int]]:
    """(request id, output tokens so far) of each preemption."""
    preempted: list[tuple[str, int]] = []
    original = driver.engine.scheduler.preempt

    def preempt(state: RequestState, now: float) -> None:
        preempted.append((state.request.request_id, state.num_output_tokens))
        original(state, now)

    driver.engine.scheduler.preempt = preempt  # type: ignore[method-assign]
    return preempted


def test_the_lowest_tier_gives_way_then_the_newest():
    old, new, flex_old, flex_new = _state(1), _state(4), _state(2, priority=1), _state(3, priority=1)
    running = [old, new, flex_old, flex_new]
    assert choose_victim(running, old) is flex_new
    assert choose_victim([old, new, flex_old], old) is flex_old
    assert choose_victim([old, new], old) is new
    assert choose_victim([old, new], new) is new


def test_who_has_produced_nothing_since_it_was_preempted_is_left_alone():
    old, middle = _state(1), _state(2)
    resumed = _state(3, num_preemptions=1)
    assert choose_victim([old, middle, resumed], old) is middle
    resumed.num_since_resume = 1
    assert choose_victim([old, middle, resumed], old) is resumed


@pytest.mark.parametrize("seed", range(5))
def test_nobody_is_preempted_twice_without_a_token_in_between_and_all_end(seed):
    rng = random.Random(seed)
    driver = _crowded()
    driver.engine.scheduler._leaves_room_to_grow = lambda num_left: True  # type: ignore[method-assign]
    preempted = _spied(driver)
    lengths = {f"r{i}": rng.randint(4, 30) for i in range(12)}
    for request_id, length in lengths.items():
        prompt = [rng.randrange(1, 900) for _ in range(rng.randint(1, 12))]
        driver.submit(make_request(request_id, prompt, length, priority=rng.randint(0, 1)))
    driver.run()
    assert len(preempted) > 6
    assert len(set(preempted)) == len(preempted)
    assert {request_id: len(driver.text(request_id)) for request_id in lengths} == lengths


def test_a_victim_resumes_before_those_that_came_after_it():
    driver = _crowded(num_blocks=8, max_num_seqs=2)
    preempted = _spied(driver)
    driver.submit(make_request("first", list(range(1, 9)), 16), make_request("second", list(range(50, 58)), 16))
    for i in range(3):
        driver.submit(make_request(f"later{i}", [100 + i] * 3, 2))
    order: list[str] = []
    while driver.step():
        order += [request_id for request_id in driver.reasons if request_id not in order]
    assert [request_id for request_id, _ in preempted] == ["second"]
    assert order[:2] == ["first", "second"]


def test_replayed_tokens_count_neither_as_cached_nor_as_hits_nor_twice_as_output():
    driver = _crowded(num_blocks=10, max_num_seqs=2)
    preempted = _spied(driver)
    driver.submit(make_request("first", list(range(1, 9)), 20), make_request("second", list(range(50, 58)), 20))
    driver.run()
    assert preempted
    stats = driver.engine.pool.stats
    assert sum(stats.hits_by_age) == 0
    assert [driver.firsts[r].prefill.num_cached_tokens for r in ("first", "second")] == [0, 0]
    assert [len(driver.text(r)) for r in ("first", "second")] == [20, 20]


def test_only_what_had_been_computed_before_is_a_replay():
    driver = EngineDriver(block_size=B, max_num_batched_tokens=4, enable_prefix_caching=False)
    driver.submit(make_request("r", list(range(1, 13)), 1))
    driver.step()
    scheduler = driver.engine.scheduler
    scheduler.preempt(scheduler.running_states()[0], driver.clock.now())
    driver.run()
    assert scheduler.stats.num_replayed_tokens == 4
    assert scheduler.stats.num_computed_tokens == 16


@pytest.mark.parametrize("clients", KINDS)
def test_sixteen_slots_on_memory_for_ten_are_no_slower_than_ten(clients: Clients):
    arrivals = workload(clients, seed=1, num_requests=120)
    num_blocks = blocks_for_ten(arrivals)
    ten = run(arrivals, max_num_seqs=10, num_blocks=num_blocks)
    sixteen = run(arrivals, max_num_seqs=16, num_blocks=num_blocks)
    assert sixteen.tokens_per_s >= 0.95 * ten.tokens_per_s
    assert sixteen.replayed_share <= 0.05
