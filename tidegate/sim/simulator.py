"""The simulator: the real gate, admission, engines and caches on a clock that jumps from event to event.

    arrival ─> Gate.submit ─┬─ Dispatch ══ hop ══> Engine.submit ─> schedule ─ step duration ─> apply
                            └─ Refuse                                                           │
    outcome <── Deliver <── Gate.handle_report <═════════════ hop ══════════════════════════════┘

A shell like the server's: it owns the clock, the event heap and the clients' behaviour (hang-ups), and re-implements
nothing. Same arrivals and same configuration give the same outcomes, to the last bit.

Steps that only repeat the one in flight (scheduler/unchanged_steps.py) have no events of their own: they are booked
when somebody looks: the gate before it decides anything, or the worker before it takes a message in. `ahead_limit=0`
steps through them one by one, with the same outcomes.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from tidegate.admission.decision import Downgrade
from tidegate.clock import SimClock
from tidegate.config import Config
from tidegate.cost_model import StepCost
from tidegate.executor.base import ExecutorInfo
from tidegate.gate.effects import CancelAtWorker, Decided, Deliver, Dispatch, GateEffect, Refuse
from tidegate.gate.gate import Gate
from tidegate.metrics.load_snapshot import StepStats
from tidegate.request import FinishReason, Request, RequestOutput
from tidegate.scheduler.static_batching import StaticBatching
from tidegate.sim.worker import SimTimes, SimWorker
from tidegate.worker.messages import StepReport

AHEAD_LIMIT = 256


@dataclass(slots=True)
class SimArrival:
    """A request as its client will send it; it hangs up after `hang_up_after` output tokens, if that is not None."""

    request: Request
    hang_up_after: int | None = None


@dataclass(slots=True)
class SimOutcome:
    """What one client saw. Times in simulated seconds. `served` is the request as admission let it in."""

    request: Request
    outcome: str = "unfinished"
    first_token_s: float | None = None
    last_token_s: float | None = None
    ended_s: float | None = None
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    worker_id: str = ""
    dispatched_s: float | None = None
    served: Request | None = None
    is_downgraded: bool = False
    predicted_ttft_s: float | None = None
    retry_after_s: float | None = None
    token_times: array[float] = field(default_factory=lambda: array("d"))
    token_ids: list[int] | None = None

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.request.arrival_s

    @property
    def tpot_s(self) -> float | None:
        if self.first_token_s is None or self.last_token_s is None or self.num_output_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.num_output_tokens - 1)


class StepRecorder(Protocol):
    """Told of every step, in runs of equal ones: `ends_s` of each, the first of which began at `start_s`."""

    def steps(self, worker_id: str, start_s: float, ends_s: list[float], num_prefill: int, num_rows: int) -> None: ...


class Simulator:
    def __init__(
        self,
        config: Config,
        info: ExecutorInfo,
        cost: StepCost,
        *,
        num_workers: int = 1,
        times: SimTimes | None = None,
        duration_of: Callable[[float], float] | None = None,
        batching: StaticBatching | None = None,
        ahead_limit: int = AHEAD_LIMIT,
        on_end: Callable[[SimOutcome], None] | None = None,
        recorder: StepRecorder | None = None,
    ) -> None:
        """`duration_of` maps the cost model's seconds of a step to those it takes (noise, a slower machine). `on_end`
        is told of each request when it has ended, at that time; it may send others."""
        self.clock = SimClock()
        self.gate = Gate(config)
        self.outcomes: dict[str, SimOutcome] = {}
        """Of requests that have not ended."""
        self.workers: dict[str, SimWorker] = {}
        self.max_waiting = 0
        """Most requests that waited at the gate at once."""
        self._config = config
        self._times = times or SimTimes()
        # What the caller draws for each step has an order of its own: then steps go one by one.
        self._ahead_limit = 0 if duration_of is not None else ahead_limit
        self._hang_up_after: dict[str, int] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self._tick_s: float | None = None
        self._on_end = on_end
        self._recorder = recorder
        for i in range(num_workers):
            worker = SimWorker(f"w{i}", info, cost, config, self._times, duration_of, batching)
            self.workers[worker.worker_id] = worker
            self._apply(self.gate.worker_ready(worker.info(config), 0.0))

    def run(self, arrivals: Iterable[SimArrival] = ()) -> list[SimOutcome]:
        """Serve arrivals (in order of arrival_s), and what `on_end` and `at` add, to the end. The arrivals' outcomes,
        in their order."""
        served: list[SimOutcome] = []
        self._next_arrival(iter(arrivals), served)
        while self._events:
            time_s, _, action = heapq.heappop(self._events)
            self.clock.advance_to(time_s)
            action()
        return served

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Do something at a time: what clients, tests and faults use."""
        self._num_events += 1
        heapq.heappush(self._events, (time_s, self._num_events, action))

    # Clients.

    def submit(self, arrival: SimArrival, *, keep_tokens: bool = False) -> SimOutcome:
        """A request that comes now. `keep_tokens`: its outcome shall hold the ids of the answer."""
        request = arrival.request
        outcome = self.outcomes[request.request_id] = SimOutcome(request, token_ids=[] if keep_tokens else None)
        if arrival.hang_up_after is not None:
            self._hang_up_after[request.request_id] = arrival.hang_up_after
        self._sync_all()
        self._apply(self.gate.submit(request, self.clock.now()))
        self.max_waiting = max(self.max_waiting, self.gate.num_waiting)
        return outcome

    def _next_arrival(self, source: Iterator[SimArrival], served: list[SimOutcome]) -> None:
        arrival = next(source, None)
        if arrival is not None:

            def arrive() -> None:
                served.append(self.submit(arrival))
                self._next_arrival(source, served)

            self.at(max(self.clock.now(), arrival.request.arrival_s), arrive)

    def _deliver(self, effect: Deliver, times: list[float]) -> None:
        """`times`: when an output's tokens reach the client, one each."""
        outcome = self.outcomes.get(effect.request_id)
        if outcome is None:
            return
        for output in effect.outputs:
            if output.token_ids:
                if outcome.first_token_s is None:
                    outcome.first_token_s = times[0]
                outcome.last_token_s = times[-1]
                outcome.num_output_tokens += len(output.token_ids)
                outcome.token_times.extend(times)
                if outcome.token_ids is not None:
                    outcome.token_ids += output.token_ids
            if output.prefill is not None:
                outcome.num_cached_tokens = output.prefill.num_cached_tokens
            if output.finish_reason is not None:
                outcome.num_preemptions = output.num_preemptions
                reason = output.finish_reason
                self._end(outcome, "error" if reason is FinishReason.ERROR else str(reason))
        limit = self._hang_up_after.get(effect.request_id)
        if limit is not None and outcome.num_output_tokens >= limit and outcome.ended_s is None:
            self._end(outcome, "hung_up")
            self._apply(self.gate.cancel(effect.request_id, self.clock.now()))

    def _end(self, outcome: SimOutcome, how: str) -> None:
        outcome.outcome, outcome.ended_s = how, self.clock.now()
        request_id = outcome.request.request_id
        del self.outcomes[request_id]
        self._hang_up_after.pop(request_id, None)
        if self._on_end is not None:
            self._on_end(outcome)

    # The gate's effects.

    def _apply(self, effects: list[GateEffect]) -> None:
        now = self.clock.now()
        for effect in effects:
            match effect:
                case Deliver():
                    self._deliver(effect, [now])
                case Dispatch(worker_id, request):
                    outcome = self.outcomes[request.request_id]
                    outcome.worker_id, outcome.dispatched_s = worker_id, now
                    self._send(worker_id, request)
                case CancelAtWorker(worker_id, request_id):
                    self._send(worker_id, request_id)
                case Decided(request, decision):
                    outcome = self.outcomes[request.request_id]
                    outcome.served = request
                    outcome.is_downgraded |= isinstance(decision, Downgrade) and self._config.gate.admission == "on"
                    predicted_ms = decision.numbers.get("predicted_ttft_ms")
                    outcome.predicted_ttft_s = None if predicted_ms is None else predicted_ms / 1e3
                case Refuse(request_id, reason, _, retry_after_s):
                    outcome = self.outcomes[request_id]
                    outcome.retry_after_s = retry_after_s
                    self._end(outcome, reason)
        deadline_s = self.gate.next_deadline()
        if deadline_s is not None and (not self._tick_s or deadline_s < self._tick_s):
            self._tick_s = deadline_s
            self.at(max(now, deadline_s), self._tick)

    def _tick(self) -> None:
        self._tick_s = None
        self._sync_all()
        self._apply(self.gate.tick(self.clock.now()))

    def _send(self, worker_id: str, message: Request | str) -> None:
        worker = self.workers[worker_id]
        self.at(self.clock.now() + self._times.hop_s, lambda: self._receive(worker, message))

    def _report(self, worker: SimWorker, report: StepReport) -> None:
        if self.gate.num_waiting:
            self._sync_all()  # what it dispatches may go to any of them
        self._apply(self.gate.handle_report(worker.worker_id, report, self.clock.now()))

    # Workers. Like the real loop: messages are taken in when they come, plans are made between steps, and what a step
    # brought is sent when the next one has been launched.

    def _receive(self, worker: SimWorker, message: Request | str) -> None:
        now = self.clock.now()
        if worker.ahead:
            self._catch_up(worker, is_interrupted=True)
        outputs = worker.take_in(message, now)
        if worker.handle is None:
            self._launch(worker, outputs, None)
        else:
            worker.pending += outputs

    def _launch(self, worker: SimWorker, outputs: list[RequestOutput], stats: StepStats | None) -> None:
        """Start the next step if there is one, and send what the one before brought."""
        now = self.clock.now()
        if worker.start_step(now):
            limit = self._ahead_limit
            if limit:
                for state in worker.engine.scheduler.planned:
                    wanted = self._hang_up_after.get(state.request.request_id)
                    if wanted is not None:
                        # Hanging up is an event: the token that makes the client do it must come from a step of its own
                        limit = min(limit, wanted - state.num_output_tokens - 1)
                if limit > 1:
                    worker.look_ahead(limit, now)
            self._end_step_at(worker, worker.last_end_s())
        elif (deadline_s := worker.engine.scheduler.deadline_s) is not None:
            self.at(deadline_s, lambda: self._wake(worker))
        self._send_report(worker, StepReport("i", outputs, worker.engine.load(now), stats), now)

    def _end_step_at(self, worker: SimWorker, time_s: float) -> None:
        worker.end_event = self._num_events + 1
        event = worker.end_event
        self.at(time_s, lambda: self._step_ended(worker, event))

    def _send_report(self, worker: SimWorker, report: StepReport, now: float) -> None:
        self.at(now + self._times.hop_s, lambda: self._report(worker, report))

    def _wake(self, worker: SimWorker) -> None:
        if worker.handle is None:
            self._launch(worker, [], None)

    def _step_ended(self, worker: SimWorker, event: int) -> None:
        if worker.end_event != event:
            return  # a message came before, and the steps were planned anew
        if worker.ahead:
            self._catch_up(worker, is_interrupted=False)
        outputs, stats = worker.end_step(self.clock.now())
        if self._recorder is not None:
            self._recorder.steps(
                worker.worker_id, stats.start_s, [self.clock.now()], stats.num_prefill_tokens, stats.num_decode_rows
            )
        self._launch(worker, outputs, stats)

    # Steps without events of their own.

    def _sync_all(self) -> None:
        """Let the gate know all that has reached it by now."""
        reported_s = self.clock.now()
        for worker in self.workers.values():
            if worker.ahead and worker.ahead[0] + self._times.hop_s <= reported_s:
                self._sync(worker)

    def _sync(self, worker: SimWorker) -> None:
        hop_s, now = self._times.hop_s, self.clock.now()
        num_steps = 0
        for end_s in worker.ahead:
            if end_s + hop_s > now:
                break
            num_steps += 1
        if num_steps == 0:
            return
        outputs, stats = self._book(worker, num_steps)
        report = StepReport("i", outputs, worker.engine.load(worker.started_s))
        reported = [(one, one.start_s + one.loop_s + hop_s) for one in stats]
        times = [time_s for _, time_s in reported]
        for effect in self.gate.handle_unchanged_steps(worker.worker_id, report, reported):
            if isinstance(effect, Deliver):
                self._deliver(effect, times)

    def _catch_up(self, worker: SimWorker, *, is_interrupted: bool) -> None:
        """Book the steps that have ended by now; then the one in flight is a step like any other."""
        now = self.clock.now()
        self._sync(worker)
        while worker.ahead and worker.ahead[0] <= now:  # their reports are still under way
            end_s = worker.ahead[0]
            outputs, (stats,) = self._book(worker, 1)
            self._send_report(worker, StepReport("i", outputs, worker.engine.load(end_s), stats), end_s)
        if is_interrupted and worker.ahead:
            worker.ahead.clear()
            self._end_step_at(worker, worker.last_end_s())

    def _book(self, worker: SimWorker, num_steps: int) -> tuple[list[RequestOutput], list[StepStats]]:
        if self._recorder is not None:
            ends_s = worker.ahead[:num_steps]
            self._recorder.steps(worker.worker_id, worker.started_s, ends_s, 0, worker.num_rows)
        return worker.book_ahead(num_steps)


__all__ = ["SimArrival", "SimOutcome", "SimTimes", "Simulator"]
