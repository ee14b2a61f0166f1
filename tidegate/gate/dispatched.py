"""What the gate knows of the requests that a worker has: which prefill, which decode, and how far each has come."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from tidegate.admission.forecast import INFINITY, RunningAnswer, WorkerOutlook
from tidegate.config import GateConfig
from tidegate.cost_model import CostModel
from tidegate.gate.look_ahead import LookAhead
from tidegate.gate.queue import Order, QueuedRequest
from tidegate.metrics.load_snapshot import StepStats
from tidegate.request import Request
from tidegate.routing.registry import WorkerEntry
from tidegate.scheduler.output_length import OutputLength

RESERVED_SHARE = 0.1


def num_reserved_slots(num_slots: int) -> int:
    """Slots that are kept from those that borrow."""
    return math.ceil(RESERVED_SHARE * num_slots)


@dataclass(slots=True)
class Dispatched:
    queued: QueuedRequest
    worker_id: str
    num_open_choices: int
    first_token_s: float | None = None
    num_output_tokens: int = 0
    is_cancelled: bool = False

    @property
    def request(self) -> Request:
        return self.queued.request


@dataclass(slots=True)
class WorkerView:
    """One worker as the gate sees it: what it was given and has not finished, and its cost model.

    `step_is_paced`: whether its steps follow the TPOT objectives.
    """

    entry: WorkerEntry
    look_ahead: LookAhead
    step_is_paced: bool
    cost_model: CostModel = field(default_factory=CostModel)
    dispatched: dict[str, Dispatched] = field(default_factory=dict)

    @property
    def num_choices(self) -> int:
        return sum(entry.num_open_choices for entry in self.dispatched.values())

    def pending(self) -> list[Dispatched]:
        """Those without a first token, in the order the worker serves them in."""
        waiting = [entry for entry in self.dispatched.values() if entry.first_token_s is None]
        waiting.sort(key=lambda entry: entry.queued.place)
        return waiting

    def num_prefill_left(self, entry: Dispatched) -> int:
        """Prompt tokens of one without a first token that will be uncomputed when the step in flight ends."""
        load = self.entry.load
        num_tokens = entry.request.num_prompt_tokens
        return num_tokens if load is None else load.prefill_left.get(entry.request.request_id, num_tokens)

    def observe(self, stats: StepStats, num_ended: int, now: float) -> None:
        self.cost_model.observe(stats.num_prefill_tokens, stats.num_decode_rows, stats.num_context_tokens, stats.loop_s)
        self.look_ahead.observe_step(stats.loop_s, num_ended, now - (stats.start_s + stats.loop_s))

    def can_take(self, queued: QueuedRequest, config: GateConfig) -> bool:
        """Whether the worker can soon use the request: a slot or look-ahead for it, and not more prefill before it than
        the next steps take. Requests of lower tiers, and borrowing ones of its own, do not count against it: the worker
        makes them give way."""
        info, request, precedence = self.entry.info, queued.request, queued.precedence
        if request.max_total_tokens > self.entry.max_request_tokens:
            return False
        num_slots, num_pending, num_ahead_tokens, num_long = 0, 0, 0, 0
        for entry in self.dispatched.values():
            if entry.queued.precedence > precedence:
                continue
            num_slots += entry.num_open_choices
            if entry.first_token_s is None:
                num_pending += 1
                num_long += entry.request.num_prompt_tokens >= config.long_prompt
                if entry.queued.place < queued.place:
                    num_ahead_tokens += entry.request.num_prompt_tokens
        num_paused = self.entry.load.num_paused if self.entry.load is not None else 0
        num_places = info.max_num_seqs + self.look_ahead.num_requests + num_paused
        if config.fair_slots == "reserve" and queued.is_borrowing:
            num_places -= self.look_ahead.num_requests + num_reserved_slots(info.max_num_seqs)
        if num_slots >= num_places:
            return False
        if num_pending and num_ahead_tokens >= 2 * info.max_num_batched_tokens:
            return False
        if request.num_prompt_tokens >= config.long_prompt and num_long >= config.max_long_prefills:
            return False
        load = self.entry.load
        is_short_of_blocks = (
            load is not None
            and load.num_waiting > 0
            and load.num_running < info.max_num_seqs
            and load.step_prefill_tokens == 0
        )
        return not (is_short_of_blocks and num_pending > self.look_ahead.num_requests)

    def outlook(self, lengths: OutputLength, now: float, *, precedence: int, num_joining: int) -> WorkerOutlook:
        """The worker as `num_joining` requests of this precedence will find it: answers of higher ones make way."""
        load = self.entry.load
        start_s = 0.0
        if load is not None and load.step_start_s:
            step_s = self.cost_model.predict(load.step_prefill_tokens, load.step_decode_rows, load.num_context_tokens)
            start_s = max(0.0, load.step_start_s + step_s - now)
        running: list[RunningAnswer] = []
        yielding: list[tuple[Order, RunningAnswer]] = []
        for entry in self.dispatched.values():
            first_token_s = entry.first_token_s
            if first_token_s is None or entry.is_cancelled:
                continue
            request, produced = entry.request, entry.num_output_tokens
            slo_s = request.tpot_slo_s
            answer = RunningAnswer(
                lengths.expected_remaining(produced, request.max_tokens),
                INFINITY if slo_s is None else slo_s,
                0.0 if slo_s is None else slo_s * max(0, produced - 1) - (now - first_token_s),
            )
            if 2 * request.priority + entry.queued.is_borrowing > precedence:
                yielding.append((entry.queued.place, answer))
            else:
                running.append(answer)
        if yielding:
            yielding.sort()
            num_kept = max(0, self.entry.info.max_num_seqs - num_joining - len(running))
            running += [answer for _, answer in yielding[:num_kept]]
        info = self.entry.info
        return WorkerOutlook(
            cost=self.cost_model.cost,
            max_num_seqs=info.max_num_seqs,
            max_num_batched_tokens=info.max_num_batched_tokens,
            is_paced=self.step_is_paced,
            start_s=start_s,
            running=running,
            num_context_tokens=load.num_context_tokens if load is not None else 0,
            max_step_s=load.max_step_s if load is not None else 0.0,
        )
