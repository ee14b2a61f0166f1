"""The cost model learns a machine, follows it when it changes, and keeps what it cannot see."""

from __future__ import annotations

import random

import pytest

from tidegate.cost_model import CostModel, StepCost

TRUE = StepCost(0.006, 0.0009, 0.0003, 4e-7)


def _seconds(cost: StepCost, prefill: int, rows: int, context: int) -> float:
    return cost.base_s + cost.prefill_token_s * prefill + cost.decode_row_s * rows + cost.context_token_s * context


def _steps(model: CostModel, cost: StepCost, count: int, rnd: random.Random, *, prefill: bool, slower: float = 1.0):
    for _ in range(count):
        rows = rnd.randint(1, 16)
        shape = (rnd.choice([0, 0, 64, 512]) if prefill else 0, rows, rows * rnd.randint(50, 500))
        model.observe(*shape, _seconds(cost, *shape) * slower * rnd.uniform(0.92, 1.08))


SHAPES = [(0, 1, 100), (0, 16, 4000), (512, 4, 1000), (128, 0, 128)]


def _worst_error(model: CostModel, slower: float = 1.0) -> float:
    return max(abs(model.predict(*shape) / (slower * _seconds(TRUE, *shape)) - 1.0) for shape in SHAPES)


def test_it_learns_a_machine_that_differs_from_the_prior():
    model = CostModel()
    _steps(model, TRUE, 300, random.Random(1), prefill=True)
    assert _worst_error(model) < 0.08


def test_a_machine_that_becomes_twice_as_slow_is_known_within_a_hundred_steps():
    model, rnd = CostModel(), random.Random(2)
    _steps(model, TRUE, 300, rnd, prefill=True)
    _steps(model, TRUE, 100, rnd, prefill=True, slower=2.0)
    assert _worst_error(model, slower=2.0) < 0.15


def test_slower_decodes_let_it_expect_slower_prefill():
    model, rnd = CostModel(), random.Random(3)
    _steps(model, TRUE, 300, rnd, prefill=True)
    before = model.cost.prefill_token_s
    _steps(model, TRUE, 100, rnd, prefill=False, slower=2.0)
    assert model.cost.prefill_token_s > 1.4 * before


def test_long_runs_of_equal_steps_do_not_spoil_what_they_do_not_show():
    model, rnd = CostModel(), random.Random(4)
    _steps(model, TRUE, 300, rnd, prefill=True)
    for _ in range(20_000):
        model.observe(0, 4, 1000, _seconds(TRUE, 0, 4, 1000) * rnd.uniform(0.9, 1.1))
    assert model.predict(512, 4, 1000) == pytest.approx(_seconds(TRUE, 512, 4, 1000), rel=0.25)


def test_one_absurd_step_moves_little():
    model, rnd = CostModel(), random.Random(5)
    _steps(model, TRUE, 300, rnd, prefill=True)
    before = model.predict(0, 8, 1000)
    model.observe(0, 8, 1000, 30.0)
    assert model.predict(0, 8, 1000) < 2.0 * before
