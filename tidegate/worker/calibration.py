"""Measures what a step costs on this machine, so that predictions are sensible before the first request has come.

    prefills of two lengths ─┐
    decodes of 1 and 16 rows ├─ median of each over all rounds ─> their differences ─> StepCost
    the same on long context ┘

Owns: the shapes, and what is made of their times. It runs before the worker is ready, on blocks that hold nothing yet;
what it leaves in them is never read. Rounds over all shapes go on until its time is up; one is always made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from tidegate.cost_model import StepCost
from tidegate.executor.base import Executor
from tidegate.request import SamplingParams
from tidegate.scheduler.step import SampleSpec, StepPlan, StepRow

BUDGET_S = 2.0
_MAX_ROUNDS = 5
_MIN_SHARE = 0.1  # of a default cost is the least that is believed: differences of times err
_GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class _Shape:
    """A step of `num_rows` rows, each of `num_tokens` tokens behind `num_computed` others."""

    num_rows: int
    num_tokens: int
    num_computed: int = 0

    @property
    def num_context_tokens(self) -> int:
        return self.num_rows * (self.num_computed + self.num_tokens)


def measure_step_cost(
    executor: Executor, *, max_num_seqs: int, max_num_batched_tokens: int, now: Callable[[], float]
) -> StepCost:
    """`now` is the clock that bounds how long this takes; steps are timed by the executor. Raises ExecutorError."""
    block_size, num_blocks = executor.block_size, executor.num_blocks
    num_rows = max(2, min(max_num_seqs, max_num_batched_tokens, 16))
    num_tokens = max(4, min(max_num_batched_tokens, 256, block_size * max(1, num_blocks // 2)))
    # Blocks may be shared, since nobody reads what they hold; a row's own token goes to a block of its own.
    num_computed = block_size * min(1024 // block_size, max(0, num_blocks - num_rows))
    shapes = (
        one_row := _Shape(1, 1),
        all_rows := _Shape(num_rows, 1),
        short := _Shape(1, num_tokens // 4),
        long := _Shape(1, num_tokens),
        far := _Shape(num_rows, 1, num_computed),
    )
    times: dict[_Shape, list[float]] = {shape: [] for shape in shapes}
    deadline_s = now() + BUDGET_S
    while True:
        for shape in shapes:
            _time(executor, shape)  # the first of a shape after another one takes longer
            times[shape].append(_time(executor, shape))
        if now() >= deadline_s or len(times[one_row]) >= _MAX_ROUNDS:
            break
    took_s = {shape: median(values) for shape, values in times.items()}
    default = StepCost()
    row_s = max(_MIN_SHARE * default.decode_row_s, (took_s[all_rows] - took_s[one_row]) / (num_rows - 1))
    token_s = (took_s[long] - took_s[short]) / (num_tokens - num_tokens // 4)
    context_token_s = default.context_token_s
    if num_computed:
        context_token_s = (took_s[far] - took_s[all_rows]) / (num_rows * num_computed)
    return StepCost(
        base_s=max(_MIN_SHARE * default.base_s, took_s[one_row] - row_s),
        decode_row_s=row_s,
        prefill_token_s=max(_MIN_SHARE * default.prefill_token_s, token_s),
        context_token_s=max(_MIN_SHARE * default.context_token_s, context_token_s),
    )


def _time(executor: Executor, shape: _Shape) -> float:
    block_size, num_blocks = executor.block_size, executor.num_blocks
    num_shared = shape.num_computed // block_size
    num_own = -(-shape.num_tokens // block_size)
    rows = []
    for row_id in range(shape.num_rows):
        first = num_shared + row_id * num_own
        block_ids = [*range(num_shared), *(block_id % num_blocks for block_id in range(first, first + num_own))]
        samples = [SampleSpec(shape.num_tokens - 1, 0, 0, _GREEDY)]
        rows.append(StepRow(row_id, [0] * shape.num_tokens, shape.num_computed, block_ids, samples))
    num_decode_rows = shape.num_rows if shape.num_tokens == 1 else 0
    num_prefill_tokens = 0 if num_decode_rows else shape.num_rows * shape.num_tokens
    plan = StepPlan(0, rows, num_prefill_tokens, num_decode_rows, shape.num_context_tokens)
    return executor.collect(executor.launch(plan)).compute_s
