"""`tidegate calibrate`: measures the executor that would serve here, and writes a profile for the simulator.

An engine serves a seeded mix (few and many at a time, short and long prompts) for the given time; each step's time and
composition is kept, and the cost of its parts is the least-squares fit of relative errors over all of them. So the
costs are those of steps as serving makes them, mixed and chunked. How well the fit explains the steps is printed.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
from rich.console import Console

from tidegate.bench.machine import describe_machine, machine_line
from tidegate.bench.report import write_text
from tidegate.config import Config, load_config
from tidegate.cost_model import StepCost
from tidegate.engine.engine import Engine
from tidegate.executor.base import Executor
from tidegate.models.load import resolve_model
from tidegate.request import Request, SamplingParams
from tidegate.sim.profile import KvTable, LoopTable, Profile, SchedulerTable, StepTable, to_toml
from tidegate.worker.build import build_engine, build_executor
from tidegate.worker.loop import settle_garbage_collection

_PHASES = (1, 2, 4, 8, 16, 16)  # requests at a time, for equal parts of the budget
_SKIPPED = 4  # steps at the start of each phase
_LONG_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """Seconds of the executor and of the whole turn of the loop, and what the step was made of."""

    compute_s: float
    turn_s: float
    num_prefill_tokens: int
    num_decode_rows: int
    num_context_tokens: int


def run(output: Path | None, config_path: Path | None, model: str | None, budget_s: float) -> int:
    """Returns the exit code. Raises ConfigError."""
    config = load_config(config_path, {"model": model})
    console = Console(stderr=True, highlight=False)
    machine = describe_machine()
    line = machine_line(machine)
    console.print(line, soft_wrap=True)
    with console.status("loading the model"):
        executor = build_executor(resolve_model(config.model.model), config)
    try:
        with console.status(f"measuring for {budget_s:g} s"):
            engine = build_engine(executor, config)
            steps = measure(engine, executor, config, budget_s)
    finally:
        executor.close()
    cost = fit(steps)
    errors = sorted(abs(_predicted(cost, step) / step.compute_s - 1.0) for step in steps)
    console.print(
        f"{len(steps)} steps; {cost.base_s * 1e3:.2f} ms + {cost.decode_row_s * 1e3:.3f} ms a row + "
        f"{cost.prefill_token_s * 1e3:.4f} ms a prompt token + {cost.context_token_s * 1e6:.4f} us a context token; "
        f"off by {median(errors):.1%} (P50), {errors[int(0.9 * (len(errors) - 1))]:.1%} (P90)",
        soft_wrap=True,
    )
    loop_s = median(max(0.0, step.turn_s - step.compute_s) for step in steps)
    text = to_toml(profile_of(engine, config, cost, loop_s, f"Measured by tidegate calibrate on {line}"))
    if output is None:
        print(text, end="")
    else:
        write_text(str(output), text)
    return 0


def profile_of(engine: Engine, config: Config, cost: StepCost, loop_s: float, source: str) -> Profile:
    info = engine.info
    return Profile(
        source=source,
        kind="measured",
        model=info.model,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        kv=KvTable(
            dtype=info.kv_cache_dtype,
            block_size=info.block_size,
            bytes_per_token=-(-info.bytes_per_block // info.block_size),
            num_blocks=info.num_blocks,
        ),
        step=StepTable(
            base_s=cost.base_s,
            decode_row_s=cost.decode_row_s,
            prefill_token_s=cost.prefill_token_s,
            context_token_s=cost.context_token_s,
        ),
        loop=LoopTable(loop_s=loop_s),
        scheduler=SchedulerTable(
            max_num_seqs=config.scheduler.max_num_seqs, max_num_batched_tokens=config.scheduler.max_num_batched_tokens
        ),
    )


def measure(engine: Engine, executor: Executor, config: Config, budget_s: float) -> list[MeasuredStep]:
    """Serve the mix on the real clock."""
    requests = _Requests(engine.info.vocab_size, engine.info.max_model_len)
    steps: list[MeasuredStep] = []
    settle_garbage_collection()
    for num_open in (min(number, config.scheduler.max_num_seqs) for number in _PHASES):
        end_s = time.monotonic() + budget_s / len(_PHASES)
        steps += _phase(engine, executor, requests, num_open, end_s)[_SKIPPED:]
    return steps


def _phase(engine: Engine, executor: Executor, requests: _Requests, num_open: int, end_s: float) -> list[MeasuredStep]:
    """A closed loop of `num_open` requests, until `end_s`; then all of them are cancelled."""
    steps: list[MeasuredStep] = []
    open_ids: set[str] = set()
    while time.monotonic() < end_s or len(steps) <= _SKIPPED:
        started_s = time.monotonic()
        while len(open_ids) < num_open:
            request = requests.next()
            engine.submit(request, started_s)
            open_ids.add(request.request_id)
        plan = engine.schedule(started_s)
        if plan is None:
            raise RuntimeError("the engine has work and plans nothing")
        result = executor.collect(executor.launch(plan))
        now = time.monotonic()
        for output in engine.apply(result, now):
            if output.finish_reason is not None:
                open_ids.discard(output.request_id)
        steps.append(
            MeasuredStep(
                result.compute_s,
                time.monotonic() - started_s,
                plan.num_prefill_tokens,
                plan.num_decode_rows,
                plan.num_context_tokens,
            )
        )
    for request_id in sorted(open_ids):
        engine.cancel(request_id, time.monotonic())
    return steps


def fit(steps: Sequence[MeasuredStep]) -> StepCost:
    """Least squares of relative errors; a part that comes out negative is taken as 0 and the others fitted again."""
    shapes = np.array([(1.0, s.num_decode_rows, s.num_prefill_tokens, s.num_context_tokens) for s in steps])
    seconds = np.array([step.compute_s for step in steps])
    parts = [0, 1, 2, 3]
    while True:
        solution, *_ = np.linalg.lstsq(shapes[:, parts] / seconds[:, None], np.ones(len(steps)), rcond=None)
        if (solution >= 0.0).all():
            break
        del parts[int(np.argmin(solution))]
    costs = [0.0] * 4
    for part, value in zip(parts, solution, strict=True):
        costs[part] = float(value)
    return StepCost(max(costs[0], 1e-6), costs[1], max(costs[2], 1e-9), costs[3])


def _predicted(cost: StepCost, step: MeasuredStep) -> float:
    return (
        cost.base_s
        + cost.decode_row_s * step.num_decode_rows
        + cost.prefill_token_s * step.num_prefill_tokens
        + cost.context_token_s * step.num_context_tokens
    )


class _Requests:
    """An endless, seeded line of requests: short prompts, and some that take many steps."""

    def __init__(self, vocab_size: int, max_model_len: int) -> None:
        self._rng = random.Random(0)
        self._vocab_size = vocab_size
        self._max_prompt = max(16, max_model_len // 2)
        self._num_made = 0

    def next(self) -> Request:
        rng = self._rng
        self._num_made += 1
        num_tokens = rng.randint(1_000, 3_000) if rng.random() < _LONG_SHARE else rng.randint(16, 400)
        max_tokens = rng.randint(8, 120)
        return Request(
            request_id=f"c{self._num_made}",
            prompt_token_ids=[rng.randrange(self._vocab_size) for _ in range(min(num_tokens, self._max_prompt))],
            params=SamplingParams(temperature=0.0, ignore_eos=True),
            max_tokens=min(max_tokens, self._max_prompt),
            seed=self._num_made,
            arrival_s=0.0,
        )
