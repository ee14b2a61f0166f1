"""Steps stay short enough for those who come while they run, and long prompts leave them the lead of the answers."""

from __future__ import annotations

import pytest

from tests.engine_driver import make_request, sim_info
from tests.gate.test_admission_in_simulation import asked
from tidegate.config import CacheConfig, Config, GateConfig, SchedulerConfig
from tidegate.cost_model import CostModel, StepCost
from tidegate.engine.engine import Engine
from tidegate.request import Request
from tidegate.scheduler.pacing import MIN_PREFILL_TOKENS, UNLIMITED, StepPacing
from tidegate.scheduler.state import RequestState
from tidegate.sim.simulator import Simulator

COST = StepCost()


def first_step(*requests: Request) -> tuple[int, float]:
    """(prompt tokens, expected seconds) of the first step of an idle engine."""
    engine = Engine(sim_info(2_000, 32), SchedulerConfig(), CacheConfig(), CostModel(COST))
    for request in requests:
        engine.submit(request, 0.0)
    plan = engine.schedule(0.0)
    assert plan is not None
    return plan.num_prefill_tokens, COST.base_s + COST.prefill_token_s * plan.num_prefill_tokens


def decoding(num_output_tokens: int, tpot_slo_s: float) -> RequestState:
    """An answer whose first token came at 0."""
    state = RequestState(
        make_request("d", [1] * 8, 100, tpot_slo_s=tpot_slo_s), 0, 1, 1, b"", None, 0.0  # type: ignore[arg-type]
    )
    state.first_token_s = 0.0
    state.token_ids += [5] * num_output_tokens
    return state


def test_a_long_prompts_step_is_a_part_of_the_tightest_objective_for_first_tokens() -> None:
    num_tokens, step_s = first_step(make_request("r", [1] * 2_000, 8, ttft_slo_s=0.3))
    assert 0.06 < step_s <= 0.075
    assert num_tokens < 512
    assert first_step(make_request("r", [1] * 2_000, 8, ttft_slo_s=10.0))[0] == 512
    assert first_step(make_request("r", [1] * 2_000, 8))[0] == 512


def test_an_objective_that_nobody_can_keep_does_not_waste_steps() -> None:
    _, step_s = first_step(make_request("r", [1] * 2_000, 8, ttft_slo_s=1e-3))
    assert step_s >= 4.9 * COST.base_s


def test_an_objective_is_forgotten_when_nobody_asks_for_it_any_more() -> None:
    pacing = StepPacing(CostModel(COST))
    pacing.asked(0.4, 0.0)
    pacing.asked(4.0, 50.0)
    assert pacing.max_step_s(59.0) == pytest.approx(0.1)
    assert pacing.max_step_s(61.0) == pytest.approx(1.0)


def test_long_prompts_leave_the_lead_of_running_answers_to_those_that_come() -> None:
    pacing = StepPacing(CostModel(COST))
    pacing.asked(0.4, 0.0)
    answers = [decoding(10, 0.03)]  # its next token is due at 0.285 s
    ahead = pacing.prefill_tokens(answers, 100, 0.15)
    assert ahead.num_long_tokens < ahead.num_tokens
    far_behind = pacing.prefill_tokens(answers, 100, 0.5)
    assert far_behind.num_tokens == far_behind.num_long_tokens == MIN_PREFILL_TOKENS
    assert StepPacing(CostModel(COST)).prefill_tokens([], 0, 0.0).num_long_tokens == UNLIMITED


def test_a_long_prompt_whose_time_runs_out_gets_all_there_is() -> None:
    pacing = StepPacing(CostModel(COST))
    state = RequestState(
        make_request("long", [1] * 4_000, 8, ttft_slo_s=9.0), 0, 1, 1, b"", None, 0.0  # type: ignore[arg-type]
    )
    assert pacing.can_wait(state, 0.0)
    assert not pacing.can_wait(state, 6.0)


def test_short_requests_keep_their_first_token_while_long_prompts_are_computed() -> None:
    arrivals = [asked("long0", 0.0, 3_500, 8, ttft_slo_s=9.0, tpot_slo_s=0.05)]
    arrivals += [asked(f"short{i}", 0.2 + 0.5 * i, 100, 8, ttft_slo_s=0.3, tpot_slo_s=0.05) for i in range(4)]
    config = Config(gate=GateConfig(admission="off"))
    outcomes = Simulator(config, sim_info(2_000, 32), COST).run(arrivals)
    assert (outcomes[0].ttft_s or 99.0) < 9.0
    # One comes before the objective is known, and may find a full step.
    assert sum((one.ttft_s or 99.0) <= 0.3 for one in outcomes[1:]) >= 3
