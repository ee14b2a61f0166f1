"""When each waiting prompt will have its first token, from the load as it is: the scheduler's rules played forward.

A worker's next seconds are played on paper, in runs of equal steps: each step gives every running answer a token and
takes as much prefill along as their pace allows (scheduler/pacing.py), in the queue's own order; answers end after what
they are expected to have left, which frees their slots. That is the work ahead, the own uncached prefill and the
interference of decodes in one figure. After `max_runs` runs the rest is taken at the rate seen so far, so the cost is
bounded however long the queue.

Pure: no clock, no queue, no learned state. All times are in seconds from the given start.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from tidegate.cost_model import StepCost
from tidegate.scheduler.pacing import MARGIN, MIN_PREFILL_TOKENS

INFINITY = float("inf")


class RunningAnswer(NamedTuple):
    """remaining: expected tokens to come. ahead_s: how far it is ahead of its pace (0 without an objective)."""

    remaining: float
    tpot_slo_s: float
    ahead_s: float


class PendingPrompt(NamedTuple):
    """num_tokens: uncached tokens still to compute. expected_output: tokens it is expected to answer with."""

    num_tokens: float
    expected_output: float
    tpot_slo_s: float


@dataclass(frozen=True, slots=True)
class WorkerOutlook:
    """A worker as a forecast starts from it. start_s: until the step in flight ends."""

    cost: StepCost
    max_num_seqs: int
    max_num_batched_tokens: int
    is_paced: bool
    start_s: float
    running: Sequence[RunningAnswer]
    num_context_tokens: int
    max_step_s: float = 0.0  # of a step with a prompt in it; 0: no limit


class FirstToken(NamedTuple):
    """time_s: when a prompt has its first token. num_running: answers that run then, its own among them."""

    time_s: float
    num_running: int


def forecast(outlook: WorkerOutlook, pending: Sequence[PendingPrompt], *, max_runs: int = 14) -> list[FirstToken]:
    """One FirstToken for each of `pending`, which come in the order they will be served in."""
    return _Play(outlook, pending).run(max_runs)


class _Play:
    """Runs dozens of times for each request that comes: what it reads often lies flat."""

    def __init__(self, outlook: WorkerOutlook, pending: Sequence[PendingPrompt]) -> None:
        cost = outlook.cost
        self._base_s = cost.base_s
        self._row_s = cost.decode_row_s
        self._context_token_s = cost.context_token_s
        self._prefill_token_s = max(cost.prefill_token_s, 1e-9)
        self._num_slots = outlook.max_num_seqs
        self._num_batched_tokens = outlook.max_num_batched_tokens
        self._is_paced = outlook.is_paced
        self._max_step_s = outlook.max_step_s or INFINITY
        self._start_s = self._time_s = outlook.start_s
        self._pending = pending
        self._step = 0
        # Answers in the batch: (step they end with, objective), and how many there are with each objective.
        self._ends = [(answer.remaining, answer.tpot_slo_s) for answer in outlook.running]
        heapq.heapify(self._ends)
        self._paces: dict[float, int] = {}
        for _, pace_s in self._ends:
            self._paces[pace_s] = self._paces.get(pace_s, 0) + 1
        self._pace_s = min(self._paces, default=INFINITY)
        self._spare_s = min((answer.ahead_s for answer in outlook.running), default=0.0)
        self._context = float(outlook.num_context_tokens)
        self._next = 0
        self._left = pending[0].num_tokens if pending else 0.0
        self._num_done_tokens = 0.0
        self._result: list[FirstToken] = []

    def run(self, max_runs: int) -> list[FirstToken]:
        num_pending, num_slots = len(self._pending), self._num_slots
        for _ in range(max_runs):
            if self._next >= num_pending:
                return self._result
            num_rows = len(self._ends)
            step_s = self._base_s + self._row_s * num_rows + self._context_token_s * self._context
            if num_rows >= num_slots:  # only decodes, until one ends
                self._advance(max(1, int(self._ends[0][0]) - self._step), step_s)
            else:
                self._prefill(step_s, self._chunk(num_rows, step_s))
        if self._next < num_pending:
            self._extrapolate()
        return self._result

    def _chunk(self, num_rows: int, step_s: float) -> float:
        """Prompt tokens in a step, as scheduler and pacing would have it."""
        room = float(max(1, self._num_batched_tokens - num_rows))
        if not self._is_paced:
            return room
        longest_s = MARGIN * self._pace_s + max(0.0, self._spare_s)
        self._spare_s = 0.0
        if longest_s > self._max_step_s:
            self._spare_s = longest_s - self._max_step_s
            longest_s = self._max_step_s
        chunk = (longest_s - step_s) / self._prefill_token_s
        if chunk < MIN_PREFILL_TOKENS:
            chunk = float(MIN_PREFILL_TOKENS)
        return chunk if chunk < room else room

    def _prefill(self, step_s: float, chunk: float) -> None:
        left = self._left
        if left > chunk:
            steps = int(left // chunk)
            if self._ends:
                steps = max(1, min(steps, int(self._ends[0][0]) - self._step))
            self._left -= steps * chunk
            self._num_done_tokens += steps * chunk
            self._advance(steps, step_s + chunk * self._prefill_token_s)
            return
        pending, room, first = self._pending, chunk, self._next
        num_pending = len(pending)
        end = min(num_pending, first + self._num_slots - len(self._ends))
        place = first
        while place < end and left <= room:
            room -= left
            place += 1
            left = pending[place].num_tokens if place < num_pending else 0.0
        if place < end:
            left -= room
            room = 0.0
        self._next, self._left = place, left
        self._num_done_tokens += chunk - room
        self._advance(1, step_s + (chunk - room) * self._prefill_token_s)
        for prompt in pending[first:place]:
            self._join(prompt)
        self._result += [FirstToken(self._time_s, len(self._ends))] * (place - first)

    def _join(self, prompt: PendingPrompt) -> None:
        pace_s = prompt.tpot_slo_s
        heapq.heappush(self._ends, (self._step + max(1.0, prompt.expected_output), pace_s))
        self._paces[pace_s] = self._paces.get(pace_s, 0) + 1
        if pace_s < self._pace_s:
            self._pace_s = pace_s
        self._context += prompt.num_tokens

    def _advance(self, steps: int, step_s: float) -> None:
        self._time_s += steps * step_s
        self._step += steps
        while self._ends and self._ends[0][0] <= self._step:
            _, pace_s = heapq.heappop(self._ends)
            self._paces[pace_s] -= 1
            if not self._paces[pace_s]:
                del self._paces[pace_s]
                self._pace_s = min(self._paces, default=INFINITY)

    def _extrapolate(self) -> None:
        elapsed_s = max(1e-6, self._time_s - self._start_s)
        rate = max(1.0, self._num_done_tokens / elapsed_s)
        num_running, time_s = len(self._ends), self._time_s
        rest = (prompt.num_tokens for prompt in self._pending[self._next + 1 :])
        self._result += [
            FirstToken(time_s + num_tokens / rate, num_running) for num_tokens in accumulate(rest, initial=self._left)
        ]
