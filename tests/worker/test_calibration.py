"""Calibration against executors whose cost is known; no real time passes."""

from __future__ import annotations

import pytest

from tests.engine_driver import sim_info
from tidegate.cost_model import StepCost
from tidegate.executor.base import Executor
from tidegate.executor.sim import SimExecutor, SimHandle
from tidegate.scheduler.step import StepPlan
from tidegate.worker.calibration import BUDGET_S, measure_step_cost


class TimedExecutor(SimExecutor):
    """Counts the seconds that its steps would have taken."""

    elapsed_s = 0.0
    num_steps = 0

    def launch(self, plan: StepPlan) -> SimHandle:
        handle = super().launch(plan)
        self.elapsed_s += handle.duration_s
        self.num_steps += 1
        return handle


def measured(executor: TimedExecutor, max_num_seqs: int = 16, max_num_batched_tokens: int = 512) -> StepCost:
    timed: Executor = executor  # type: ignore[assignment]  # its handles are its own
    return measure_step_cost(
        timed,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        now=lambda: executor.elapsed_s,
    )


@pytest.mark.parametrize("slower", [0.3, 1.0, 4.0])
def test_a_machines_cost_is_found(slower: float) -> None:
    true = StepCost(0.009 * slower, 0.0011 * slower, 0.00054 * slower, 2e-7 * slower)
    executor = TimedExecutor(sim_info(num_blocks=2000, block_size=32), true, check_kv=True)
    found = measured(executor)
    for name in ("base_s", "decode_row_s", "prefill_token_s"):
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=0.02)
    assert executor.elapsed_s < BUDGET_S + 2.0 * slower


def test_a_slow_machine_is_measured_once_and_no_longer() -> None:
    executor = TimedExecutor(sim_info(num_blocks=2000, block_size=32), StepCost(1.5, 0.1, 0.01, 0.0))
    assert measured(executor).base_s == pytest.approx(1.5)
    assert executor.num_steps == 2 * 5


@pytest.mark.parametrize(("num_blocks", "max_num_seqs", "budget"), [(1, 1, 1), (1, 16, 512), (3, 2, 2), (20, 16, 16)])
def test_small_machines_can_be_measured(num_blocks: int, max_num_seqs: int, budget: int) -> None:
    executor = TimedExecutor(sim_info(num_blocks=num_blocks, block_size=4), StepCost(), check_kv=True)
    found = measured(executor, max_num_seqs, budget)
    assert min(found.base_s, found.decode_row_s, found.prefill_token_s, found.context_token_s) > 0
