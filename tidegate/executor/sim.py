"""An executor that computes nothing and says how long it would have taken.

It has no clock: a handle carries `duration_s`, and whoever drives the engine waits that long, really or not. The tokens
are drawn from (seed, position) by hashing. With `check_kv` it keeps what each position of each block holds and draws
from the whole context as read through the block table, so that any mistake in the books changes the text.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from zlib import crc32

from tidegate.cost_model import StepCost
from tidegate.executor.base import ExecutorError, ExecutorInfo
from tidegate.request import TokenLogprobs
from tidegate.scheduler.step import SampleSpec, StepPlan, StepResult, StepRow


@dataclass(slots=True)
class SimHandle:
    plan: StepPlan
    duration_s: float


class SimExecutor:
    """`first_token_id` .. vocab_size - 1 are the ids it draws; `cost` gives the durations, `info` everything else."""

    def __init__(
        self, info: ExecutorInfo, cost: StepCost | None = None, *, check_kv: bool = False, first_token_id: int = 0
    ) -> None:
        self.info = info
        self.num_blocks = info.num_blocks
        self.block_size = info.block_size
        self.step_cost = cost or StepCost()
        self._first_token_id = first_token_id
        self._kv = [array("i", [-1]) * info.block_size for _ in range(info.num_blocks)] if check_kv else None
        self._in_flight = False

    def launch(self, plan: StepPlan) -> SimHandle:
        if self._in_flight:
            raise ExecutorError("a step is in flight")
        self._in_flight = True
        seconds = self.step_s(plan.num_prefill_tokens, plan.num_decode_rows, plan.num_context_tokens)
        return SimHandle(plan, seconds)

    def step_s(self, num_prefill_tokens: int, num_decode_rows: int, num_context_tokens: int) -> float:
        """Seconds that a step of this composition takes."""
        return self.step_cost.step_s(num_prefill_tokens, num_decode_rows, num_context_tokens)

    def draw_ahead(self, plan: StepPlan, num_steps: int) -> list[list[int]]:
        """For each row of a plan in flight that only decodes, the tokens that it and its successors would draw. Without
        check_kv only."""
        if self._kv is not None:
            raise ExecutorError("with check_kv a token depends on those before it")
        first_token_id, span = self._first_token_id, self.info.vocab_size - self._first_token_id
        drawn = []
        for row in plan.rows:
            spec = row.samples[0]
            seed, position = spec.seed, spec.position
            drawn.append(
                [first_token_id + crc32(b"%d,%d" % (seed, i)) % span for i in range(position, position + num_steps)]
            )
        return drawn

    def collect(self, handle: SimHandle) -> StepResult:
        self._in_flight = False
        plan = handle.plan
        if self._kv is not None:
            self.copy_blocks(plan.block_copies)
            for row in plan.rows:
                self._write_row(row)
        token_ids = [self._draw(row, spec) for row in plan.rows for spec in row.samples]
        result = StepResult(token_ids, handle.duration_s)
        specs = [spec for row in plan.rows for spec in row.samples]
        if any(spec.params.logprobs is not None for spec in specs):
            result.logprobs = [
                TokenLogprobs(token_id, -1.0, ((token_id, -1.0),) * min(1, spec.params.logprobs))
                if spec.params.logprobs is not None
                else None
                for token_id, spec in zip(token_ids, specs, strict=True)
            ]
        wanted = {row.row_id: row.next_token_ids for row in plan.rows if row.prompt_logprobs is not None}
        if wanted:
            result.prompt_logprobs = {
                row_id: [TokenLogprobs(token_id, -1.0) for token_id in next_ids or ()]
                for row_id, next_ids in wanted.items()
            }
        return result

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        if self._kv is not None:
            for source, destination in pairs:
                self._kv[destination][:] = self._kv[source]

    def read_blocks(self, block_ids: list[int]) -> list[bytes]:
        if self._kv is None:
            return [b""] * len(block_ids)
        return [self._kv[block_id].tobytes() for block_id in block_ids]

    def write_blocks(self, block_ids: list[int], data: list[bytes]) -> None:
        if self._kv is None:
            return
        for block_id, content in zip(block_ids, data, strict=True):
            if len(content) != self.block_size * 4:
                raise ValueError(f"a block has {self.block_size * 4} bytes, not {len(content)}")
            self._kv[block_id] = array("i", content)

    def close(self) -> None:
        pass

    def _write_row(self, row: StepRow) -> None:
        assert self._kv is not None
        for i, token_id in enumerate(row.token_ids, start=row.num_computed):
            self._kv[row.block_ids[i // self.block_size]][i % self.block_size] = token_id

    def _draw(self, row: StepRow, spec: SampleSpec) -> int:
        key = crc32(b"%d,%d" % (spec.seed, spec.position))
        if self._kv is not None:
            num_tokens = row.num_computed + spec.offset + 1
            content = array("i")
            for block_id in row.block_ids[: -(-num_tokens // self.block_size)]:
                content += self._kv[block_id]
            key = crc32(content[:num_tokens].tobytes(), key if spec.params.temperature > 0 else 0)
        span = self.info.vocab_size - self._first_token_id
        token_id = self._first_token_id + key % span
        while token_id in spec.banned_token_ids:
            token_id = self._first_token_id + (token_id + 1 - self._first_token_id) % span
        return token_id
