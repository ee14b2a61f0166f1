"""Steps that only repeat the one in flight: every running answer gets one token more, and nothing else changes.

A shell that computes nothing (the simulator) can have many of them booked at once. The result is what stepping through
them one by one would give, to the last block: blocks are taken and published at the step, and with the time, at which
they would have been.

    step in flight   1   2   3   4   5                    5 steps unchanged:
    answer a         .   .   |   .   .   .  . end         | a block is full: published when the step ends, and the next
    answer b         .   .   .   .   |   .  .               one is taken when the next step begins

Owns: how many steps are unchanged, and booking them in the scheduler's states. Never: tokens' values, outputs, time.
"""

from __future__ import annotations

from collections.abc import Sequence

from tidegate.scheduler.scheduler import Scheduler
from tidegate.scheduler.state import RequestState
from tidegate.scheduler.static_batching import StaticScheduler
from tidegate.scheduler.step import StepPlan


def num_unchanged_steps(scheduler: Scheduler, plan: StepPlan, limit: int) -> int:
    """How many times from `plan`, which is in flight, on a step ends and an equal one follows; at most `limit`.

    0 when anything may differ: a prompt to compute, someone who could join or must make way, an answer that may end
    before its cap, a block that would have to be taken from another.
    """
    if isinstance(scheduler, StaticScheduler) or plan.num_prefill_tokens or scheduler.prefilling:
        return 0
    states = scheduler.planned
    if len(states) != len(scheduler.decoding) or plan.block_copies or scheduler.block_copies:
        return 0
    turns = scheduler.long_decodes
    if turns.is_turning:
        return 0
    first = scheduler.waiting.peek()
    if first is not None or len(scheduler.waiting):
        limit = min(limit, turns.num_steps_until_pause(states))
        if first is None or scheduler.num_running < scheduler.max_num_seqs:
            return 0
        if any(state.order[0] > first.order[0] for state in states):
            return 0  # they may have to give way
    for state in states:
        if state.stop_token_ids or state.output_counts is not None or state.params.logprobs is not None:
            return 0
        left = state.max_total_tokens - len(state.token_ids) - 1
        if left < limit:
            limit = left
    while limit > 0 and _num_blocks_needed(states, limit, scheduler.block_size) > scheduler.pool.num_available:
        limit //= 2
    return max(0, limit)


def unchanged_until_s(scheduler: Scheduler, now: float) -> float:
    """Steps that begin at this time or later may find a conversation's blocks expired."""
    until_s = scheduler.pool.cache.sessions.next_due_s
    for state in scheduler.planned:
        if state.user.ttl_s is not None and now + state.user.ttl_s < until_s:
            until_s = now + state.user.ttl_s
    return until_s


def _num_blocks_needed(states: Sequence[RequestState], num_steps: int, block_size: int) -> int:
    return sum(
        max(0, -(-(state.num_computed + num_steps + 1) // block_size) - len(state.block_ids)) for state in states
    )


def book_unchanged_steps(
    scheduler: Scheduler, plan: StepPlan, token_ids: Sequence[list[int]], ends_s: Sequence[float]
) -> None:
    """The plan in flight and its successors end at `ends_s`; `plan` becomes the one that is in flight then.

    `token_ids` holds each row's new tokens, as many as there are ends.
    """
    num_steps = len(ends_s)
    states, block_size = scheduler.planned, scheduler.block_size
    full: list[tuple[int, int]] = []  # (steps ended, row): whose last block is full then
    for place, state in enumerate(states):
        state.token_ids += token_ids[place]
        state.num_since_resume += num_steps
        first = block_size - state.num_computed % block_size
        if first <= num_steps:
            full += [(num_ended, place) for num_ended in range(first, num_steps + 1, block_size)]
    _book_blocks(scheduler, states, full, ends_s)
    for place, (row, state) in enumerate(zip(plan.rows, states, strict=True)):
        state.num_computed = row.num_computed = row.num_computed + num_steps
        row.token_ids = [token_ids[place][-1]]
        row.samples[0].position += num_steps
    plan.step_id += num_steps
    plan.num_context_tokens += num_steps * len(states)
    scheduler.skipped(num_steps, len(states))


def _book_blocks(
    scheduler: Scheduler, states: Sequence[RequestState], full: list[tuple[int, int]], ends_s: Sequence[float]
) -> None:
    full.sort()
    block_size = scheduler.block_size
    at = 0
    while at < len(full):
        num_ended = full[at][0]
        now = ends_s[num_ended - 1]
        starved: list[RequestState] = []
        while at < len(full) and full[at][0] == num_ended:
            state = states[full[at][1]]
            # Exact multiples of the block size; the last of them stands until the caller sets the final count.
            state.num_computed += block_size - state.num_computed % block_size
            scheduler.publish(state, now)
            if state.num_computed >= len(state.block_ids) * block_size:
                starved.append(state)
            at += 1
        starved.sort(key=lambda state: state.order)
        for state in starved:
            blocks = scheduler.pool.allocate(1, now)
            if blocks is None:
                raise RuntimeError("a block was available and is not")
            state.block_ids += blocks
