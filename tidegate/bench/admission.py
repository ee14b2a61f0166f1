"""`tidegate bench admission`: what a decision at the gate costs, with 1,000 requests waiting there.

A worker with 16 running answers and its look-ahead, three tiers whose objectives let the queue grow that long. Timed,
on the real clock: `Gate.submit` of one request more (prediction, decision, its place in the queue), which is cancelled
again; and that of requests that are refused. Nothing is computed and nothing is sent.
"""

from __future__ import annotations

import random
import time
from typing import Any

from tidegate.bench.machine import describe_machine, machine_line
from tidegate.bench.report import check_writable, console_for, percentile, plain_table, write_json
from tidegate.config import Config, GateConfig, TierConfig
from tidegate.gate.effects import Dispatch, Refuse
from tidegate.gate.gate import Gate
from tidegate.metrics.load_snapshot import LoadReport, StepStats
from tidegate.request import FinishReason, Request, RequestOutput, SamplingParams
from tidegate.version import __version__
from tidegate.worker.loop import settle_garbage_collection
from tidegate.worker.messages import PROTOCOL_VERSION, StepReport, WorkerInfo

NUM_QUEUED = 1_000
NUM_TIMED = 2_000
LIMIT_US = 200.0
_TIERS = ("priority", "default", "default", "flex", "flex")
_NUM_SLOTS = 16
_STEP_S = 0.03


def run(json_path: str | None = None) -> int:
    """Returns the exit code: 1 when the median of an admitted request is above the limit."""
    check_writable(json_path)
    console = console_for(json_path)
    machine = describe_machine()
    console.print(machine_line(machine), soft_wrap=True)
    result = measure(NUM_QUEUED, NUM_TIMED)
    rows = [
        (name, *(f"{result[part][share]:.0f}" for share in ("p50", "p99", "max")), f"{LIMIT_US:g}")
        for name, part in (("queued", "queued_us"), ("refused", "refused_us"))
    ]
    title = f"Admission of one request, {result['num_queued']:,} waiting"
    console.print(plain_table(title, ("", "us", "P99", "max", "limit"), rows))
    write_json({**result, "limit_us": LIMIT_US, "machine": machine}, json_path)
    return 0 if result["queued_us"]["p50"] <= LIMIT_US else 1


def measure(num_queued: int, num_timed: int) -> dict[str, Any]:
    gate, source = _loaded_gate(num_queued)
    settle_garbage_collection()
    queued_us = [_timed(gate, source.next(), is_refused=False) for _ in range(num_timed)]
    refused_us = [_timed(gate, source.next(ttft_slo_s=1e-3), is_refused=True) for _ in range(num_timed)]
    return {"num_queued": gate.num_waiting, "queued_us": _summary(queued_us), "refused_us": _summary(refused_us)}


def _timed(gate: Gate, request: Request, *, is_refused: bool) -> float:
    """Microseconds of its submit. It leaves again."""
    started_s = time.perf_counter()
    effects = gate.submit(request, request.arrival_s)
    took_us = (time.perf_counter() - started_s) * 1e6
    if isinstance(effects[0], Refuse) is not is_refused:
        raise RuntimeError(f"request {request.request_id} was decided otherwise than it should be: {effects[0]}")
    gate.cancel(request.request_id, request.arrival_s)
    return took_us


def _loaded_gate(num_queued: int) -> tuple[Gate, _Requests]:
    """A gate with so many requests waiting, and a worker in the middle of its work."""
    tiers = {
        name: TierConfig(rank=rank, ttft_slo=3_600.0, tpot_slo=0.5, max_queued=10 * num_queued)
        for rank, name in enumerate(("priority", "default", "flex"))
    }
    gate = Gate(Config(tiers=tiers, gate=GateConfig(max_queued=10 * num_queued, queue_timeout=36_000.0)))
    gate.worker_ready(_worker(), 0.0)
    source = _Requests()
    for length in range(_NUM_SLOTS * 4):  # answers to learn lengths from
        _answer(gate, source.next(), 16 + 2 * length, source.now)
    running: list[str] = []
    num_reported = 0
    while gate.num_waiting < num_queued:
        effects = gate.submit(source.next(), source.now)
        running += [effect.request.request_id for effect in effects if isinstance(effect, Dispatch)]
        if num_reported < _NUM_SLOTS and len(running) > num_reported:
            source.now += _STEP_S
            _report(gate, source.now, RequestOutput(running[num_reported], 0, [1], source.now))
            num_reported += 1
    return gate, source


def _answer(gate: Gate, request: Request, num_tokens: int, now: float) -> None:
    gate.submit(request, now)
    _report(gate, now, RequestOutput(request.request_id, 0, [1] * num_tokens, now, FinishReason.STOP))


def _report(gate: Gate, now: float, output: RequestOutput) -> None:
    load = LoadReport(
        time_s=now, num_running=_NUM_SLOTS, num_waiting=2, num_waiting_tokens=500, num_context_tokens=4_000,
        free_blocks=1_000, cached_blocks=500, held_blocks=500, step_start_s=now, step_prefill_tokens=64,
        step_decode_rows=_NUM_SLOTS,
    )  # fmt: skip
    stats = StepStats(
        step_id=1, start_s=now - _STEP_S, compute_s=_STEP_S, loop_s=_STEP_S, num_prefill_tokens=0,
        num_decode_rows=_NUM_SLOTS, num_context_tokens=4_000, num_preemptions=0, num_evictions=0,
    )  # fmt: skip
    gate.handle_report("w", StepReport("i", [output], load, stats), now)


def _worker() -> WorkerInfo:
    return WorkerInfo(
        worker_id="w", incarnation="i", pid=0, version=__version__, protocol_version=PROTOCOL_VERSION, model="sim",
        weight_digest="", weight_format="none", kv_cache_dtype="u8", compute_dtype="none", block_size=32,
        num_blocks=2_000, bytes_per_block=1, vocab_size=49_152, max_model_len=8_192, max_num_seqs=_NUM_SLOTS,
        max_num_batched_tokens=512,
    )  # fmt: skip


def _summary(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {name: round(percentile(ordered, share), 1) for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))}


class _Requests:
    """An endless, seeded line of requests: prompts of 32-512 tokens, one in ten of 2,000-6,000."""

    def __init__(self) -> None:
        self.now = 1.0
        self._rng = random.Random(0)
        self._num_made = 0

    def next(self, ttft_slo_s: float | None = None) -> Request:
        rng = self._rng
        self._num_made += 1
        num_tokens = rng.randint(2_000, 6_000) if rng.random() < 0.1 else rng.randint(32, 512)
        return Request(
            request_id=f"r{self._num_made}",
            prompt_token_ids=[0] * num_tokens,
            params=SamplingParams(max_tokens=1_024),
            max_tokens=1_024,
            seed=0,
            arrival_s=self.now,
            tier=rng.choice(_TIERS),
            ttft_slo_s=ttft_slo_s,
        )
