"""Drives an Engine with the sim executor and no real time, the way every shell does."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from tidegate.clock import SimClock
from tidegate.config import CacheConfig, SchedulerConfig
from tidegate.engine.engine import Engine
from tidegate.executor.base import ExecutorInfo
from tidegate.executor.sim import SimExecutor
from tidegate.request import FinishReason, Request, RequestOutput, SamplingParams


def sim_info(num_blocks: int = 64, block_size: int = 4, **changes: Any) -> ExecutorInfo:
    values: dict[str, Any] = {
        "model": "sim",
        "weight_digest": "0" * 64,
        "weight_format": "none",
        "kv_cache_dtype": "u8",
        "compute_dtype": "none",
        "block_size": block_size,
        "num_blocks": num_blocks,
        "bytes_per_block": 1,
        "vocab_size": 1000,
        "max_model_len": 4096,
    }
    return ExecutorInfo(**(values | changes))


def make_request(request_id: str, prompt: list[int], max_tokens: int = 8, **changes: Any) -> Request:
    params = changes.pop("params", None) or SamplingParams(temperature=0.0)
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt,
        params=params,
        max_tokens=max_tokens,
        seed=changes.pop("seed", 0),
        arrival_s=0.0,
        **changes,
    )


class EngineDriver:
    """`outputs[request_id][index]` collects token ids, `reasons[request_id][index]` how each choice ended."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_num_seqs: int = 4,
        max_num_batched_tokens: int = 16,
        long_output: int = 512,
        check_kv: bool = True,
        audit: bool = True,
        **cache: Any,
    ) -> None:
        info = sim_info(num_blocks, block_size)
        self.clock = SimClock()
        self.executor = SimExecutor(info, check_kv=check_kv)
        self.engine = Engine(
            info,
            SchedulerConfig(
                max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, long_output=long_output
            ),
            CacheConfig(**cache),
        )
        self.outputs: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        self.reasons: dict[str, dict[int, FinishReason]] = defaultdict(dict)
        self.errors: dict[str, str] = {}
        self.firsts: dict[str, RequestOutput] = {}
        self.num_steps = 0
        self.num_prefill_tokens = 0
        self._audit = audit

    def submit(self, *requests: Request) -> None:
        for request in requests:
            self._take(self.engine.submit(request, self.clock.now()))
        self._check()

    def cancel(self, request_id: str) -> None:
        self._take(self.engine.cancel(request_id, self.clock.now()))
        self._check()

    def step(self) -> bool:
        """One step; False when there was nothing to compute."""
        plan = self.engine.schedule(self.clock.now())
        if plan is None:
            return False
        assert plan.num_tokens <= self.engine.scheduler.max_num_batched_tokens
        assert self.engine.scheduler.num_running <= self.engine.scheduler.max_num_seqs
        handle = self.executor.launch(plan)
        self.clock.advance_to(self.clock.now() + handle.duration_s)
        self._take(self.engine.apply(self.executor.collect(handle), self.clock.now()))
        self.num_steps += 1
        self.num_prefill_tokens += plan.num_prefill_tokens
        self._check()
        return True

    def run(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if not self.step():
                assert not self.engine.has_work, "the engine has work and plans nothing"
                return
        raise AssertionError(f"not done after {max_steps} steps")

    def text(self, request_id: str, index: int = 0) -> list[int]:
        return self.outputs[request_id][index]

    def _take(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            assert output.index not in self.reasons[output.request_id], "output after the end"
            self.outputs[output.request_id][output.index] += output.token_ids
            if output.prefill is not None:
                self.firsts[output.request_id] = output
            if output.finish_reason is not None:
                self.reasons[output.request_id][output.index] = output.finish_reason
            if output.error:
                self.errors[output.request_id] = output.error

    def _check(self) -> None:
        if self._audit:
            self.engine.audit()
