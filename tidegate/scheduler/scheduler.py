"""What the next step computes, and for whom.

Each step: every running decode gets its token first; prefills go on, in their order, within what is left of
max_num_batched_tokens and what the decodes' objectives allow (pacing.py); then waiting states join while slots, blocks
and budget allow. Blocks for all that a state has, and its next token, are taken when it joins, so a prefill never stops
for want of blocks; a decode that needs a block and finds none makes the worst placed state give way (preemption.py),
which replays later from its old place.

Owns: slots, the waiting states, the plan. Never: tensors, text, sampling, or telling anyone (the engine does).
"""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.config import CacheConfig, SchedulerConfig
from tidegate.cost_model import CostModel
from tidegate.kv.block_hash import block_hash, extend_block_hashes
from tidegate.kv.block_pool import NO_BLOCK, BlockContent, BlockPool
from tidegate.request import Phase
from tidegate.scheduler.kv_shares import KvShares, of_same_tenant, share_key
from tidegate.scheduler.long_decodes import LongDecodes
from tidegate.scheduler.output_length import OutputLength, peak_growth
from tidegate.scheduler.pacing import UNLIMITED, PrefillBudget, StepPacing
from tidegate.scheduler.preemption import choose_lower_tier_victim, choose_victim
from tidegate.scheduler.state import RequestState
from tidegate.scheduler.step import SampleSpec, StepPlan, StepRow
from tidegate.scheduler.waiting import WaitingStates


@dataclass(frozen=True, slots=True)
class _Hit:
    """Cached blocks to share, and a block whose first num_tail_tokens are to be copied."""

    block_ids: list[int]
    tail_id: int
    num_tail_tokens: int


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the start."""

    num_preemptions: int = 0
    num_replayed_tokens: int = 0
    num_computed_tokens: int = 0


def _order(state: RequestState) -> tuple[int, float, int, int]:
    return state.order


class Scheduler:
    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        scheduler: SchedulerConfig,
        cache: CacheConfig,
        cost_model: CostModel,
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.max_num_seqs = scheduler.max_num_seqs
        self.max_num_batched_tokens = scheduler.max_num_batched_tokens
        self.step_pacing = StepPacing(cost_model) if scheduler.step == "adaptive" else None
        self.enable_prefix_caching = cache.enable_prefix_caching
        self.kv_shares = KvShares(pool.num_blocks, block_size)
        self.waiting = WaitingStates()
        self.long_decodes = LongDecodes(scheduler)
        # Running states by row_id, in order of admission: those that prefill, and those that decode.
        self.prefilling: dict[int, RequestState] = {}
        self.decoding: dict[int, RequestState] = {}
        self.stats = SchedulerStats()
        self.output_length = OutputLength()
        self.block_copies: list[tuple[int, int]] = []
        self._computing: dict[bytes, int] = {}  # block hash -> row_id of the state that is computing it
        self._step_id = 0
        self._max_blocks_running = 0  # what the running states would hold if all used up their max_tokens
        self._growth: float | None = None  # blocks they are expected to need; computed when first asked in a step
        self.planned: list[RequestState] = []  # parallel to the rows of the plan in flight

    @property
    def num_running(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    @property
    def deadline_s(self) -> float | None:
        """When to ask for a plan again though nothing has happened. Here: never."""
        return None

    def max_step_s(self, now: float) -> float:
        """Longest that a step with a prompt in it is to take; 0 without a limit."""
        limit_s = float("inf") if self.step_pacing is None else self.step_pacing.max_step_s(now)
        return 0.0 if limit_s == float("inf") else limit_s

    def schedule(self, now: float) -> StepPlan | None:
        """The next step, or None when nothing can be computed."""
        rows: list[StepRow] = []
        planned: list[RequestState] = []
        self._growth = None
        self.pool.expire_sessions(now)
        self._make_room_for_urgent(now)
        self._turn_long_decodes(now)
        self._make_room_for_decodes(now)
        num_decode_rows, num_context_tokens = self._plan_decodes(rows, planned)
        budget = PrefillBudget(UNLIMITED, UNLIMITED)
        if self.step_pacing is not None:
            budget = self.step_pacing.prefill_tokens(planned, num_context_tokens, now)
        num_left = self.max_num_batched_tokens - num_decode_rows
        budget = PrefillBudget(min(budget.num_tokens, num_left), min(budget.num_long_tokens, num_left))
        num_prefill_tokens = self._plan_prefills(budget, rows, planned, now)
        if not rows:
            return None
        num_context_tokens += sum(row.num_computed + len(row.token_ids) for row in rows[num_decode_rows:])
        self._step_id += 1
        self.planned = planned
        self.stats.num_computed_tokens += num_prefill_tokens + num_decode_rows
        copies, self.block_copies = self.block_copies, []
        return StepPlan(self._step_id, rows, num_prefill_tokens, num_decode_rows, num_context_tokens, copies)

    def skipped(self, num_steps: int, num_rows: int) -> None:
        """So many steps of `num_rows` decodes have been planned elsewhere (unchanged_steps.py)."""
        self._step_id += num_steps
        self.stats.num_computed_tokens += num_steps * num_rows

    def _plan_prefills(
        self, budget: PrefillBudget, rows: list[StepRow], planned: list[RequestState], now: float
    ) -> int:
        """Rows for prompts that go on and for those that join, by their order. Returns how many tokens."""
        going_on = sorted(self.prefilling.values(), key=_order, reverse=True)
        may_join = True
        num_tokens = 0
        while num_tokens < budget.num_tokens:
            may_join = may_join and self.num_running < self.max_num_seqs
            first = self.waiting.peek() if may_join else None
            if first is not None and (not going_on or first.order < going_on[-1].order):
                if num_tokens >= self._limit(first, budget, now):
                    may_join = False
                    continue
                state = self._admit_next(now)
                may_join = state is not None
            else:
                state = going_on.pop() if going_on else None
                if state is None:
                    break
            if state is not None and num_tokens < (limit := self._limit(state, budget, now)):
                num_tokens += self._plan_prefill(state, limit - num_tokens, rows, planned)
        return num_tokens

    def _limit(self, state: RequestState, budget: PrefillBudget, now: float) -> int:
        """Prompt tokens that a step may have with those of `state`."""
        pacing = self.step_pacing
        if pacing is None or state.num_uncomputed <= self.max_num_batched_tokens or not pacing.can_wait(state, now):
            return budget.num_tokens
        return budget.num_long_tokens

    def _make_room_for_urgent(self, now: float) -> None:
        """Where the first in line is of a higher tier than some that run, and lacks a slot or blocks, they give way."""
        first = self.waiting.peek()
        if first is None or not self._is_within_share(first, self._match(first)):
            return
        num_blocks = -(-len(first.token_ids) // self.block_size)
        while self.num_running >= self.max_num_seqs or self.pool.num_available < num_blocks:
            victim = choose_lower_tier_victim(self.running_states(), first)
            if victim is None:
                return
            self.preempt(victim, now)

    def _turn_long_decodes(self, now: float) -> None:
        """Long answers give way to those that wait, or go on (long_decodes.py): at most one change a step."""
        turns, first = self.long_decodes, self.waiting.peek()
        if first is not None and self.num_running >= self.max_num_seqs:
            victim = turns.choose_to_pause(self.running_states(), first)
            if victim is not None:
                self._pause(victim, now)
                return
        if not turns.num_paused:
            return
        running = self.running_states()
        num_free_slots = self.max_num_seqs - self.num_running if first is None else 0
        state = turns.choose_to_resume(running, num_free_slots=num_free_slots)
        if state is None:
            swap = turns.choose_to_swap(running, now)
            if swap is None:
                return
            victim, state = swap
            self._pause(victim, now)
        turns.resume(state)
        self.waiting.push(state)

    def _pause(self, state: RequestState, now: float) -> None:
        """As preempt, but it does not wait for a slot until it is its turn again."""
        self._stop(state, now)
        self.long_decodes.pause(state, now)

    def _make_room_for_decodes(self, now: float) -> None:
        """Give each decode the block that its next position needs, at the expense of the worst placed."""
        block_size = self.block_size
        starved = [s for s in self.decoding.values() if s.num_computed >= len(s.block_ids) * block_size]
        starved.sort(key=_order)
        for state in starved:
            while state.phase is Phase.RUNNING:
                if not self.may_grow(state):
                    self.preempt(choose_victim(of_same_tenant(state, self.running_states()), state), now)
                    continue
                blocks = self.pool.allocate(1, now)
                if blocks is not None:
                    state.block_ids += blocks
                    break
                self.preempt(choose_victim(self.running_states(), state), now)

    def may_grow(self, state: RequestState) -> bool:
        """Whether its tenant's share has a block more for a running state."""
        return state.request.max_kv_share >= 1.0 or self.kv_shares.may_grow(state, self.running_states())

    def running_states(self) -> list[RequestState]:
        return [*self.prefilling.values(), *self.decoding.values()]

    def _plan_decodes(self, rows: list[StepRow], planned: list[RequestState]) -> tuple[int, int]:
        """One row for each decode. Returns how many, and how many tokens they attend to."""
        states = list(self.decoding.values())
        if len(states) > self.max_num_batched_tokens:
            states = states[: self.max_num_batched_tokens]
            for state in states:  # to the end, so that the next step serves the others
                self.decoding[state.row_id] = self.decoding.pop(state.row_id)
        num_context_tokens = 0
        for state in states:
            num_computed = state.num_computed
            num_context_tokens += num_computed
            rows.append(
                StepRow(
                    state.row_id, [state.token_ids[-1]], num_computed, state.block_ids, [self._sample_spec(state, 0, 0)]
                )
            )
        planned += states
        return len(states), num_context_tokens + len(states)

    def _plan_prefill(self, state: RequestState, budget: int, rows: list[StepRow], planned: list[RequestState]) -> int:
        """A row for as much of the state's uncomputed tokens as the budget allows. Returns how many tokens."""
        start = state.num_computed
        end = min(len(state.token_ids), start + budget)
        samples: list[SampleSpec] = []
        if end == len(state.token_ids):
            num_choices = state.params.n if state.index == 0 and state.num_output_tokens == 0 else 1
            samples = [self._sample_spec(state, end - start - 1, choice) for choice in range(num_choices)]
        row = StepRow(state.row_id, state.token_ids[start:end], start, state.block_ids, samples)
        if state.params.prompt_logprobs is not None and state.num_output_tokens == 0 and state.index == 0:
            row.prompt_logprobs = state.params.prompt_logprobs
            row.next_token_ids = state.token_ids[start + 1 : end + 1]
        rows.append(row)
        planned.append(state)
        self.stats.num_replayed_tokens += max(0, min(end, state.num_once_computed) - start)
        return end - start

    def _sample_spec(self, state: RequestState, offset: int, choice: int) -> SampleSpec:
        position = len(state.token_ids) - state.num_prompt_tokens
        params = state.params
        spec = SampleSpec(offset, state.seed + choice, position, params)
        if state.output_counts is not None:
            spec.output_counts = state.output_counts
            spec.prompt_token_ids = state.request.prompt_token_ids
            if params.bad_words:
                spec.recent_token_ids = state.token_ids[-max(len(word) for word in params.bad_words) :]
        if position < params.min_tokens:
            spec.banned_token_ids = state.request.stop_token_ids
        return spec

    # Joining the batch.

    def _admit_next(self, now: float) -> RequestState | None:
        """Give a slot and blocks to the first waiting state that need not wait for another's prefill. None when there
        is none, or when it has to wait for blocks (those behind it do not overtake it)."""
        while (state := self.waiting.peek()) is not None:
            hit = self._match(state)
            missing = self._first_missing_hash(state, len(hit.block_ids))
            if missing is not None and missing in self._computing:
                self.waiting.park(missing)
                continue
            if not self._is_within_share(state, hit):
                self.waiting.park(share_key(state))
                continue
            if not self._reserve(state, hit, now):
                return None
            self.waiting.pop()
            self._join(state, hit)
            return state
        return None

    def _is_within_share(self, state: RequestState, hit: _Hit) -> bool:
        if state.request.max_kv_share >= 1.0:
            return True
        num_new = self._num_blocks_to_join(state) - len(hit.block_ids)
        return self.kv_shares.may_join(state, hit.block_ids, num_new, self.running_states(), self._expected_remaining)

    def _num_blocks_to_join(self, state: RequestState) -> int:
        """For all that it has, and its next token."""
        num_tokens = min(len(state.token_ids) + 1, max(len(state.token_ids), state.max_total_tokens - 1))
        return -(-num_tokens // self.block_size)

    def _match(self, state: RequestState) -> _Hit:
        """What the state can start from. Its last token is always computed: its logits are needed."""
        if not self.enable_prefix_caching or state.params.prompt_logprobs is not None:
            return _Hit([], NO_BLOCK, 0)
        tokens, block_size = state.token_ids, self.block_size
        extend_block_hashes(state.block_hashes, state.root_hash, tokens, block_size)
        block_ids = self.pool.cache.match(state.block_hashes, (len(tokens) - 1) // block_size)
        start = len(block_ids) * block_size
        parent_hash = state.block_hashes[len(block_ids) - 1] if block_ids else state.root_hash
        tail = tokens[start : min(start + block_size, len(tokens) - 1)]
        tail_id, num_tail_tokens = self.pool.cache.tails.match(parent_hash, tail)
        return _Hit(block_ids, tail_id, num_tail_tokens)

    def _first_missing_hash(self, state: RequestState, num_cached_blocks: int) -> bytes | None:
        if num_cached_blocks < min(len(state.block_hashes), (len(state.token_ids) - 1) // self.block_size):
            return state.block_hashes[num_cached_blocks]
        return None

    def _reserve(self, state: RequestState, hit: _Hit, now: float) -> bool:
        """Hold the cached blocks and allocate the others; all or nothing."""
        cached = hit.block_ids
        num_new = self._num_blocks_to_join(state) - len(cached)
        num_unheld_hits = sum(self.pool.num_holders(block_id) == 0 for block_id in cached)
        num_available = self.pool.num_available - num_unheld_hits
        if num_new > num_available:
            self.pool.stats.num_delayed_for_blocks += self._is_newly_delayed(state)
            return False
        if not self._may_join(state, num_available - num_new):
            self.pool.stats.num_delayed_for_growth += self._is_newly_delayed(state)
            return False
        self.pool.hold(cached, state.user, now, is_replay=state.num_cached_tokens >= 0)
        new = self.pool.allocate(num_new, now)
        if new is None:
            raise RuntimeError(f"{num_new} blocks were available and are not")
        state.block_ids = cached + new
        if hit.num_tail_tokens:
            # Even if `new` has just evicted the source: copies are done before anything is computed.
            self.block_copies.append((hit.tail_id, new[0]))
        return True

    def _is_newly_delayed(self, state: RequestState) -> bool:
        """True once a state, if it has to wait although some blocks could be had."""
        if state.was_delayed or not self.pool.num_available:
            return False
        state.was_delayed = True
        return True

    def _may_join(self, state: RequestState, num_left: int) -> bool:
        """Whether a state for which there are blocks may join, leaving `num_left` to those who run."""
        return not self.num_running or self._leaves_room_to_grow(num_left)

    def _leaves_room_to_grow(self, num_left: int) -> bool:
        """Whether `num_left` blocks are enough for those who run already, so that none will have to be preempted."""
        if self._max_blocks_running <= num_left:
            return True
        if self._growth is None:
            self._growth = peak_growth(
                ((self._expected_remaining(s), len(s.block_ids)) for s in self.running_states()), self.block_size
            )
        return self._growth <= num_left

    def _expected_remaining(self, state: RequestState) -> float:
        cap = state.max_total_tokens - state.num_prompt_tokens
        return self.output_length.expected_remaining(state.num_output_tokens, cap)

    def _join(self, state: RequestState, hit: _Hit) -> None:
        num_cached_blocks = len(hit.block_ids)
        state.phase = Phase.RUNNING
        state.num_computed = num_cached_blocks * self.block_size + hit.num_tail_tokens
        state.num_published = num_cached_blocks
        state.num_since_resume = 0
        if state.num_cached_tokens < 0:
            state.num_cached_tokens = state.num_computed
        self.prefilling[state.row_id] = state
        self._max_blocks_running += self._max_blocks(state)
        if self._growth is not None:  # close enough until the next step computes it anew
            self._growth += self._expected_remaining(state) / self.block_size
        for name in state.block_hashes[num_cached_blocks:]:
            self._computing.setdefault(name, state.row_id)

    # Leaving the batch, and what a computed step changes.

    def start_decoding(self, state: RequestState) -> None:
        """The prefill of a running state is done and it goes on."""
        del self.prefilling[state.row_id]
        self.decoding[state.row_id] = state

    def join_decoding(self, fork: RequestState) -> None:
        """A choice that was forked off a running one, blocks included, takes a slot."""
        self.decoding[fork.row_id] = fork
        self._max_blocks_running += self._max_blocks(fork)

    def publish(self, state: RequestState, now: float) -> None:
        """Put the blocks of `state` that have become full and computed into the prefix cache."""
        num_full = state.num_computed // self.block_size
        if num_full <= state.num_published or not self.enable_prefix_caching:
            return
        extend_block_hashes(state.block_hashes, state.root_hash, state.token_ids, self.block_size)
        for i in range(state.num_published, num_full):
            self._publish_block(state, i, state.block_hashes[i], now)
            self._computed(state, state.block_hashes[i])
        state.num_published = num_full

    def publish_tail(self, state: RequestState, now: float) -> None:
        """Put the computed part of its last block there too, for copying; done when the state lets go of it."""
        num_full = state.num_computed // self.block_size
        if state.num_computed % self.block_size and num_full == state.num_published and self.enable_prefix_caching:
            parent_hash = self._parent_hash(state, num_full)
            tail = state.token_ids[num_full * self.block_size : state.num_computed]
            if not self.pool.cache.covers(parent_hash, tail):
                self._publish_block(state, num_full, block_hash(parent_hash, tail), now)

    def offer_tail(self, state: RequestState) -> None:
        """Let others copy the computed part of the last block of a running state: the end of a prompt."""
        num_full = state.num_computed // self.block_size
        if state.num_computed % self.block_size and num_full == state.num_published and self.enable_prefix_caching:
            tail = state.token_ids[num_full * self.block_size : state.num_computed]
            self.pool.cache.tails.add(state.block_ids[num_full], self._parent_hash(state, num_full), tail)

    def _publish_block(self, state: RequestState, i: int, name: bytes, now: float) -> None:
        blocks, start = state.block_ids, i * self.block_size
        content = BlockContent(
            hash=name,
            parent_hash=self._parent_hash(state, i),
            parent_id=blocks[i - 1] if i else NO_BLOCK,
            token_ids=state.token_ids[start : min(start + self.block_size, state.num_computed)],
        )
        self.pool.cache.tails.remove(blocks[i])
        blocks[i] = self.pool.publish(blocks[i], content, state.user, now)

    def _parent_hash(self, state: RequestState, i: int) -> bytes:
        return state.block_hashes[i - 1] if i else state.root_hash

    def preempt(self, state: RequestState, now: float) -> None:
        """Take everything from a running state; it waits at its old place and replays what it had."""
        self._stop(state, now)
        self.waiting.push(state)

    def _stop(self, state: RequestState, now: float) -> None:
        state.num_once_computed = max(state.num_once_computed, state.num_computed)
        self._leave(state, now)
        state.phase = Phase.PREEMPTED
        state.num_preemptions += 1
        self.stats.num_preemptions += 1

    def queue(self, state: RequestState) -> None:
        if self.step_pacing is not None and state.num_cached_tokens < 0:
            self.step_pacing.asked(state.request.ttft_slo_s, state.received_s)
        self.waiting.push(state)

    def finish(self, state: RequestState, now: float) -> None:
        """Release all that a state holds, in whatever phase it is. The one place where that happens."""
        was_waiting = state.phase in (Phase.DISPATCHED, Phase.PREEMPTED)
        state.phase = Phase.FINISHED
        if was_waiting:
            if not self.long_decodes.forget(state):
                self.waiting.remove(state)
            return
        self.output_length.observe(state.num_output_tokens)
        self.pool.stats.num_tail_waste_tokens += len(state.block_ids) * self.block_size - state.num_computed
        self.pool.stats.num_finished_blocks += len(state.block_ids)
        self._leave(state, now)

    def _leave(self, state: RequestState, now: float) -> None:
        if self.prefilling.pop(state.row_id, None) or self.decoding.pop(state.row_id, None):
            self._max_blocks_running -= self._max_blocks(state)
        if state.block_ids:
            self.publish_tail(state, now)
        self.pool.release(state.block_ids, now)
        for name in state.block_hashes[state.num_published :]:
            self._computed(state, name)
        if state.request.max_kv_share < 1.0:
            self.waiting.wake(share_key(state))
        state.block_ids = []
        state.num_computed = 0
        state.num_published = 0

    def _max_blocks(self, state: RequestState) -> int:
        return -(-(state.max_total_tokens - 1) // self.block_size)

    def _computed(self, state: RequestState, name: bytes) -> None:
        """`state` has computed this block, or will not: whoever waited for it can go on."""
        if self._computing.get(name) == state.row_id:
            del self._computing[name]
            self.waiting.wake(name)
