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

from tidegate.cost_model import StepCost
from tidegate.scheduler.pacing import MARGIN, MIN_PREFILL_TOKENS

INFINITY = float("inf")


@dataclass(frozen=True, slots=True)
class RunningAnswer:
    """remaining: expected tokens to come. ahead_s: how far it is ahead of its pace (0 without an objective)."""

    remaining: float
    tpot_slo_s: float
    ahead_s: float


@dataclass(frozen=True, slots=True)
class PendingPrompt:
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


@dataclass(frozen=True, slots=True)
class FirstToken:
    """time_s: when a prompt has its first token. num_running: answers that run then, its own among them."""

    time_s: float
    num_running: int


def forecast(outlook: WorkerOutlook, pending: Sequence[PendingPrompt], *, max_runs: int = 60) -> list[FirstToken]:
    """One FirstToken for each of `pending`, which come in the order they will be served in."""
    return _Play(outlook, pending).run(max_runs)


class _Play:
    def __init__(self, outlook: WorkerOutlook, pending: Sequence[PendingPrompt]) -> None:
        self._outlook = outlook
        self._pending = pending
        self._time_s = outlook.start_s
        self._step = 0
        self._ends = [(answer.remaining, answer.tpot_slo_s) for answer in outlook.running]
        heapq.heapify(self._ends)
        self._spare_s = min((answer.ahead_s for answer in outlook.running), default=0.0)
        self._context = float(outlook.num_context_tokens)
        self._next = 0
        self._left = pending[0].num_tokens if pending else 0.0
        self._num_done_tokens = 0.0
        self._result: list[FirstToken] = []

    def run(self, max_runs: int) -> list[FirstToken]:
        for _ in range(max_runs):
            if self._next >= len(self._pending):
                return self._result
            if len(self._ends) >= self._outlook.max_num_seqs:
                self._decode_until_an_end()
            else:
                self._prefill()
        self._extrapolate()
        return self._result

    def _step_s(self) -> float:
        cost = self._outlook.cost
        return cost.base_s + cost.decode_row_s * len(self._ends) + cost.context_token_s * self._context

    def _chunk(self, step_s: float) -> float:
        """Prompt tokens in a step, as scheduler and pacing would have it."""
        room = float(max(1, self._outlook.max_num_batched_tokens - len(self._ends)))
        if not self._outlook.is_paced or not self._ends:
            return room
        pace_s = MARGIN * min(tpot_slo_s for _, tpot_slo_s in self._ends)
        if pace_s == INFINITY:
            return room
        spare_s, self._spare_s = max(0.0, self._spare_s), 0.0
        chunk = (pace_s + spare_s - step_s) / max(self._outlook.cost.prefill_token_s, 1e-9)
        return min(room, max(float(MIN_PREFILL_TOKENS), chunk))

    def _decode_until_an_end(self) -> None:
        steps = max(1, int(self._ends[0][0]) - self._step)
        self._advance(steps, self._step_s())

    def _prefill(self) -> None:
        step_s = self._step_s()
        chunk = self._chunk(step_s)
        per_token_s = self._outlook.cost.prefill_token_s
        if self._left > chunk:
            steps = int(self._left // chunk)
            if self._ends:
                steps = max(1, min(steps, int(self._ends[0][0]) - self._step))
            self._left -= steps * chunk
            self._num_done_tokens += steps * chunk
            self._advance(steps, step_s + chunk * per_token_s)
            return
        room = chunk
        first = self._next
        slots = self._outlook.max_num_seqs - len(self._ends)
        while self._next < len(self._pending) and self._left <= room and self._next - first < slots:
            room -= self._left
            self._next += 1
            self._left = self._pending[self._next].num_tokens if self._next < len(self._pending) else 0.0
        if self._next < len(self._pending) and self._next - first < slots:
            self._left -= room
            room = 0.0
        self._num_done_tokens += chunk - room
        self._advance(1, step_s + (chunk - room) * per_token_s)
        for prompt in self._pending[first : self._next]:
            heapq.heappush(self._ends, (self._step + max(1.0, prompt.expected_output), prompt.tpot_slo_s))
            self._context += prompt.num_tokens
        self._result += [FirstToken(self._time_s, len(self._ends))] * (self._next - first)

    def _advance(self, steps: int, step_s: float) -> None:
        self._time_s += steps * step_s
        self._step += steps
        while self._ends and self._ends[0][0] <= self._step:
            heapq.heappop(self._ends)

    def _extrapolate(self) -> None:
        elapsed_s = max(1e-6, self._time_s - self._outlook.start_s)
        rate = max(1.0, self._num_done_tokens / elapsed_s)
        num_tokens = self._left
        for i in range(self._next, len(self._pending)):
            if i > self._next:
                num_tokens += self._pending[i].num_tokens
            self._result.append(FirstToken(self._time_s + num_tokens / rate, len(self._ends)))
