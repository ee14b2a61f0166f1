"""The fixed work: equal each time, run so many at a time, and never counted when an answer is short."""

from __future__ import annotations

import pytest

from tests.engine_driver import sim_info
from tidegate.bench.fixed_work import Answered, FedLoop, FixedWork, check_answers, fixed_work
from tidegate.clock import RealClock
from tidegate.config import CacheConfig, SchedulerConfig
from tidegate.engine.engine import Engine
from tidegate.executor.sim import SimExecutor, SimHandle
from tidegate.scheduler.step import StepPlan


class CountingExecutor(SimExecutor):
    """Notes how many rows each step had."""

    def __init__(self) -> None:
        super().__init__(sim_info(num_blocks=4_096, block_size=16))
        self.num_rows: list[int] = []

    def launch(self, plan: StepPlan) -> SimHandle:
        self.num_rows.append(len(plan.rows))
        return super().launch(plan)


def fed(num_at_once: int) -> tuple[FedLoop, CountingExecutor]:
    executor = CountingExecutor()
    config = SchedulerConfig(max_num_seqs=num_at_once, max_num_batched_tokens=512)
    engine = Engine(executor.info, config, CacheConfig(enable_prefix_caching=False))
    return FedLoop(engine, executor, RealClock()), executor


def test_the_work_is_the_same_each_time_and_as_described() -> None:
    work = fixed_work(49_152)
    assert work == fixed_work(49_152)
    assert len(work) == 48
    assert all(64 <= len(item.prompt_token_ids) <= 512 and 32 <= item.num_output_tokens <= 128 for item in work)
    assert len({tuple(item.prompt_token_ids[:8]) for item in work}) == 48
    assert all(0 <= token_id < 49_152 for item in work for token_id in item.prompt_token_ids)


@pytest.mark.parametrize("num_at_once", [1, 3])
def test_slots_are_full_until_the_work_runs_out_and_never_fuller(num_at_once: int) -> None:
    loop, executor = fed(num_at_once)
    work = [FixedWork([7, 8, 9, place], 5) for place in range(9)]
    run = loop.run(work)
    assert run.num_output_tokens == 45
    assert run.num_steps == len(executor.num_rows) == 45 / num_at_once
    assert set(executor.num_rows) == {num_at_once}


def test_a_run_can_be_repeated_on_the_same_engine() -> None:
    loop, _ = fed(2)
    work = [FixedWork([1, 2, place], 4) for place in range(4)]
    first, second = loop.run(work), loop.run(work)
    assert [a.token_ids for a in first.answers] == [a.token_ids for a in second.answers]


def test_figures_are_those_of_the_answers() -> None:
    loop, _ = fed(2)
    figures = loop.run([FixedWork([1, 2, 3], 6)] * 2).figures()
    assert figures["output_tokens"] == 12
    assert figures["steps"] == 6
    assert figures["busy_share"] >= 0


def test_an_answer_of_another_length_spoils_the_run() -> None:
    with pytest.raises(RuntimeError, match="request 1 brought 2 tokens, not 3: out of luck"):
        check_answers(
            [FixedWork([1], 1), FixedWork([1], 3)],
            [Answered(token_ids=[1]), Answered(token_ids=[1, 2], error="out of luck")],
        )
