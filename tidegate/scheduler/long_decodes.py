"""Long answers give way to those that wait: how many slots they may hold, who is paused, and when it goes on.

    running, more than long_output tokens ── others of its tier or above wait, all slots are taken, and long answers
                                             hold more than their share ──> paused
    paused ── a slot is free and nobody waits, or long answers hold less than their share, or it has been paused for
              MAX_PAUSE_S (the long answer that has had the most since then takes its turn at being paused) ──> waiting

A paused answer gives its blocks back to the pool, where they stay as cached ones while they are not needed: when it
goes on it finds them there, and computes again only what the eviction policy has let go. Its place is kept, which is
before all those of its tier that came later. Long answers always have a slot and end, so none of them starves.

Owns: paused states, and the choice. Never: slots, blocks or the waiting states (the scheduler).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tidegate.config import SchedulerConfig
from tidegate.request import Phase
from tidegate.scheduler.state import RequestState

MAX_PAUSE_S = 5.0
MIN_TURN = 64
"""Tokens that an answer produces in a turn before it can be paused again: a turn must be worth the change."""


class LongDecodes:
    def __init__(self, config: SchedulerConfig) -> None:
        self.num_pauses = 0
        self._long_output = config.long_output
        self._num_slots = max(1, int(config.max_long_decode_share * config.max_num_seqs))
        self._is_off = self._num_slots >= config.max_num_seqs
        self._paused: dict[int, tuple[float, RequestState]] = {}  # by row_id: (since when, who), the longest first
        self._returning: dict[int, RequestState] = {}  # those that wait for a slot again

    @property
    def num_paused(self) -> int:
        return len(self._paused)

    @property
    def is_turning(self) -> bool:
        """Whether some are paused, or on their way back."""
        return bool(self._paused) or self._num_returning(0) > 0

    def num_steps_until_pause(self, states: Sequence[RequestState]) -> int:
        """Steps that `states` can go on for until one of them may have to give way to someone who waits."""
        if self._is_off or len(states) <= self._num_slots:
            return 1 << 30
        lengths = sorted((state.num_output_tokens for state in states), reverse=True)
        return max(0, self._long_output - lengths[self._num_slots] - 1)

    def choose_to_pause(self, running: Iterable[RequestState], first: RequestState) -> RequestState | None:
        """Who gives its slot to `first`, which waits for one: of those of the lowest tier, the one that has had the
        most in its turn. None when long answers hold no more than their share."""
        if self._is_off or first.num_output_tokens > self._long_output:
            return None
        rank = first.order[0]
        holders = self._holders(running, rank)
        return _longest_turn(holders) if len(holders) + self._num_returning(rank) > self._num_slots else None

    def pause(self, state: RequestState, now: float) -> None:
        self.num_pauses += 1
        self._paused[state.row_id] = (now, state)

    def forget(self, state: RequestState) -> bool:
        """`state` has ended. Whether it was paused."""
        return self._paused.pop(state.row_id, None) is not None

    def choose_to_resume(self, running: Sequence[RequestState], *, num_free_slots: int) -> RequestState | None:
        """A paused one that may go on; `num_free_slots` are free and nobody waits for them."""
        if not self._paused:
            return None
        _, state = next(iter(self._paused.values()))
        rank = state.order[0]
        num_held = len(self._holders(running, rank)) + self._num_returning(rank)
        return state if num_free_slots > 0 or num_held < self._num_slots else None

    def choose_to_swap(self, running: Sequence[RequestState], now: float) -> tuple[RequestState, RequestState] | None:
        """(who is paused, who goes on instead) when one has been paused for long enough."""
        if not self._paused:
            return None
        since_s, state = next(iter(self._paused.values()))
        if now < since_s + MAX_PAUSE_S:
            return None
        victim = _longest_turn(self._holders(running, state.order[0]))
        return None if victim is None else (victim, state)

    def resume(self, state: RequestState) -> None:
        del self._paused[state.row_id]
        self._returning[state.row_id] = state

    def _holders(self, running: Iterable[RequestState], rank: int) -> list[RequestState]:
        limit = self._long_output
        return [state for state in running if state.num_output_tokens > limit and state.order[0] >= rank]

    def _num_returning(self, rank: int) -> int:
        if not self._returning:
            return 0
        self._returning = {i: state for i, state in self._returning.items() if state.phase is Phase.PREEMPTED}
        return sum(state.order[0] >= rank for state in self._returning.values())


def _longest_turn(states: Iterable[RequestState]) -> RequestState | None:
    able = [state for state in states if state.num_since_resume >= MIN_TURN]
    return max(able, key=lambda state: (state.order[0], state.num_since_resume, state.order), default=None)
