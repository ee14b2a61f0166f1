"""`tidegate bench scheduler`: what the scheduler itself costs a step, with an executor that computes nothing.

Two cases: 64 running, and 1,000 running with 10,000 waiting on 100,000 blocks. Requests end and waiting ones join all
the while, prompts are hashed, blocks are published and evicted, as when serving. Timed: schedule and apply of each
step, on the real clock; the steps themselves take no time. Garbage collection is set as in a worker.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any

from tidegate.bench.machine import describe_machine, machine_line
from tidegate.bench.report import check_writable, console_for, percentile, plain_table, write_json
from tidegate.config import CacheConfig, SchedulerConfig
from tidegate.engine.engine import Engine
from tidegate.executor.base import ExecutorInfo
from tidegate.executor.sim import SimExecutor
from tidegate.request import Request, SamplingParams
from tidegate.worker.loop import settle_garbage_collection

_VOCAB_SIZE = 49_152
_WARM_UP_STEPS = 100
_TIMED = ("schedule_ms", "apply_ms", "total_ms")


@dataclass(frozen=True)
class Case:
    name: str
    num_running: int
    num_waiting: int
    num_blocks: int
    num_batched_tokens: int
    num_steps: int
    limit_ms: float


CASES = (
    Case("64 running", 64, 64, 4_000, 512, 2_000, 0.3),
    Case("1,000 running, 10,000 waiting, 100,000 blocks", 1_000, 10_000, 100_000, 2_048, 500, 3.0),
)


def run(json_path: str | None = None, *, num_steps: int | None = None) -> int:
    """Returns the exit code: 1 when a case is slower than it may be."""
    check_writable(json_path)
    console = console_for(json_path)
    machine = describe_machine()
    console.print(machine_line(machine), soft_wrap=True)
    results = []
    for case in CASES:
        with console.status(case.name):
            results.append(measure(case, num_steps or case.num_steps))
    rows = [
        (
            result["case"],
            *(f"{result[part][name]:.3f}" for part in _TIMED for name in ("p50", "p99")),
            f"{result['limit_ms']:g}",
        )
        for result in results
    ]
    headings = ("", "schedule ms", "P99", "apply ms", "P99", "both ms", "P99", "limit")
    console.print(plain_table("Scheduler alone, a step", headings, rows))
    write_json({"cases": results, "machine": machine}, json_path)
    return 0 if all(result["total_ms"]["p50"] <= result["limit_ms"] for result in results) else 1


def measure(case: Case, num_steps: int) -> dict[str, Any]:
    info = ExecutorInfo(
        model="sim", weight_digest="0" * 64, weight_format="none", kv_cache_dtype="u8", compute_dtype="none",
        block_size=32, num_blocks=case.num_blocks, bytes_per_block=1, vocab_size=_VOCAB_SIZE, max_model_len=8_192,
    )  # fmt: skip
    executor = SimExecutor(info)
    config = SchedulerConfig(max_num_seqs=case.num_running, max_num_batched_tokens=case.num_batched_tokens)
    engine = Engine(info, config, CacheConfig())
    source = _Requests()
    for _ in range(case.num_running + case.num_waiting):
        engine.submit(source.next(), 0.0)
    settle_garbage_collection()
    now = 0.0
    schedule_ms: list[float] = []
    apply_ms: list[float] = []
    running: list[int] = []
    steps_left = _WARM_UP_STEPS + num_steps
    while steps_left:
        started_s = time.perf_counter()
        plan = engine.schedule(now)
        scheduled_s = time.perf_counter()
        if plan is None:
            raise RuntimeError("the engine has work and plans nothing")
        handle = executor.launch(plan)
        result = executor.collect(handle)
        now += handle.duration_s
        collected_s = time.perf_counter()
        outputs = engine.apply(result, now)
        applied_s = time.perf_counter()
        for output in outputs:
            if output.finish_reason is not None:
                engine.submit(source.next(), now)
        if steps_left <= num_steps:
            schedule_ms.append((scheduled_s - started_s) * 1e3)
            apply_ms.append((applied_s - collected_s) * 1e3)
            running.append(engine.scheduler.num_running)
        if steps_left <= num_steps or engine.scheduler.num_running == case.num_running:
            steps_left -= 1  # counted from the first step with all slots taken
    total_ms = [a + b for a, b in zip(schedule_ms, apply_ms, strict=True)]
    return {
        "case": case.name,
        "schedule_ms": _summary(schedule_ms),
        "apply_ms": _summary(apply_ms),
        "total_ms": _summary(total_ms),
        "limit_ms": case.limit_ms,
        "steps": num_steps,
        "running_mean": round(sum(running) / len(running), 1),
        "waiting": len(engine.scheduler.waiting),
        "evictions": engine.pool.stats.num_evictions,
    }


def _summary(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {name: round(percentile(ordered, share), 4) for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))}


class _Requests:
    """An endless, seeded line of requests: prompts of 64-512 tokens, answers of 256-1,024."""

    def __init__(self) -> None:
        self._rng = random.Random(0)
        self._token_ids = list(range(1_000, _VOCAB_SIZE))
        self._num_made = 0

    def next(self) -> Request:
        rng = self._rng
        self._num_made += 1
        max_tokens = rng.randint(256, 1_024)
        return Request(
            request_id=f"r{self._num_made}",
            prompt_token_ids=rng.choices(self._token_ids, k=rng.randint(64, 512)),
            params=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
            max_tokens=max_tokens,
            seed=self._num_made,
            arrival_s=0.0,
        )
