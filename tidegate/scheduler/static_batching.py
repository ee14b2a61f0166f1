"""Static batching, to compare with (bench and simulator only): a batch enters together and leaves together.

    wait for batch_size requests, or max_wait_s ─> prefill all, padded to the longest prompt ─> decode all until the
    longest answer ends ─> the next batch

The padding is accounted where it costs: the plan's counts are those of the padded batch, so that simulated steps take
as long as real ones would. A row that has ended goes on costing a decode row, and nobody takes its place or its room
until the whole batch has ended. Its client gets its tokens as they come, as with continuous batching.

A gate in front must let a whole batch's prompts through at once: set max_num_batched_tokens to what they may have.

The plan's rows themselves are those of live states, so neither engine nor executor knows of padding.
Invariant: a batch has room for the longest answers of all its members, so nothing is ever preempted.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.config import CacheConfig, SchedulerConfig
from tidegate.cost_model import CostModel
from tidegate.kv.block_pool import BlockPool
from tidegate.scheduler.scheduler import Scheduler
from tidegate.scheduler.state import RequestState
from tidegate.scheduler.step import StepPlan, StepRow


@dataclass(frozen=True, slots=True)
class StaticBatching:
    """A batch starts when `batch_size` requests are there, or when it could have started for `max_wait_s`: the first
    of them is there, and the batch before has ended."""

    batch_size: int = 16
    max_wait_s: float = 0.5


class StaticScheduler(Scheduler):
    """A Scheduler whose admission and accounting are those of static batching; the books are the same."""

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        scheduler: SchedulerConfig,
        cache: CacheConfig,
        cost_model: CostModel,
        batching: StaticBatching,
    ) -> None:
        super().__init__(pool, block_size, scheduler, cache, cost_model)
        self.batching = batching
        self.num_padding_prefill_tokens = 0
        self.num_padding_decode_rows = 0
        self.num_batches = 0
        self._batch: list[RequestState] = []
        self._free_since_s = float("-inf")

    @property
    def num_running(self) -> int:
        """All places are taken together, by the batch that runs or by those who gather for the next one."""
        return self.batching.batch_size if self._batch or len(self.waiting) else 0

    @property
    def deadline_s(self) -> float | None:
        first = None if self._batch else self.waiting.peek()
        return None if first is None else max(first.received_s, self._free_since_s) + self.batching.max_wait_s

    def schedule(self, now: float) -> StepPlan | None:
        self.pool.expire_sessions(now)
        self.planned = []
        if not (self.prefilling or self.decoding):
            if self._batch:
                self._batch = []
                self._free_since_s = now
            return self._first_step(now)
        return self._decode_step(now)

    def join_decoding(self, fork: RequestState) -> None:
        super().join_decoding(fork)
        self._batch.append(fork)

    def _first_step(self, now: float) -> StepPlan | None:
        """The whole batch's prompts, in one step."""
        deadline_s = self.deadline_s
        if deadline_s is None or (now < deadline_s and len(self.waiting) < self.batching.batch_size):
            return None
        while len(self._batch) < self.batching.batch_size and (state := self._admit_next(now)) is not None:
            self._batch.append(state)
        self.num_batches += 1
        rows: list[StepRow] = []
        for state in self._batch:
            self._plan_prefill(state, state.num_uncomputed, rows, self.planned)
        num_tokens = len(rows) * max(len(row.token_ids) for row in rows)
        num_context_tokens = len(rows) * max(len(state.token_ids) for state in self._batch)
        self.num_padding_prefill_tokens += num_tokens - sum(len(row.token_ids) for row in rows)
        return self._plan(rows, num_tokens, 0, num_context_tokens)

    def _decode_step(self, now: float) -> StepPlan:
        """A token for each that goes on; those that have ended cost the same."""
        rows: list[StepRow] = []
        self._make_room_for_decodes(now)
        self._plan_decodes(rows, self.planned)
        longest = max(len(state.token_ids) for state in self._batch)
        self.num_padding_decode_rows += len(self._batch) - len(rows)
        return self._plan(rows, 0, len(self._batch), len(self._batch) * longest)

    def _may_join(self, state: RequestState, num_left: int) -> bool:
        most = sum(self._max_blocks(member) for member in [*self._batch, state])
        return not self._batch or most <= self.pool.num_blocks

    def _plan(
        self, rows: list[StepRow], num_prefill_tokens: int, num_decode_rows: int, num_context_tokens: int
    ) -> StepPlan:
        self._step_id += 1
        self.stats.num_computed_tokens += num_prefill_tokens + num_decode_rows
        copies, self.block_copies = self.block_copies, []
        return StepPlan(self._step_id, rows, num_prefill_tokens, num_decode_rows, num_context_tokens, copies)
