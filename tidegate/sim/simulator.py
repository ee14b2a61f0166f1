"""The simulator: the real gate, admission, engines and caches on a clock that jumps from event to event.

    arrival ─> Gate.submit ─┬─ Dispatch ══ hop ══> Engine.submit ─> schedule ─ step duration ─> apply
                            └─ Refuse                                                           │
    outcome <── Deliver <── Gate.handle_report <═════════════ hop ══════════════════════════════┘

A shell like the server's: it owns the clock, the event heap and the clients' behaviour (hang-ups), and re-implements
nothing. Same arrivals and same configuration give the same outcomes, to the last bit.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from tidegate.clock import SimClock
from tidegate.config import Config
from tidegate.cost_model import StepCost
from tidegate.engine.engine import Engine
from tidegate.executor.base import ExecutorInfo
from tidegate.executor.sim import SimExecutor, SimHandle
from tidegate.gate.effects import CancelAtWorker, Deliver, Dispatch, GateEffect, Refuse
from tidegate.gate.gate import Gate
from tidegate.metrics.load_snapshot import StepStats
from tidegate.request import FinishReason, Request, RequestOutput
from tidegate.scheduler.static_batching import StaticBatching
from tidegate.version import __version__
from tidegate.worker.messages import PROTOCOL_VERSION, StepReport, WorkerInfo


@dataclass(slots=True)
class SimArrival:
    """A request as its client will send it; it hangs up after `hang_up_after` output tokens, if that is not None."""

    request: Request
    hang_up_after: int | None = None


@dataclass(slots=True)
class SimOutcome:
    """What one client saw. Times in simulated seconds."""

    request: Request
    outcome: str = "unfinished"
    first_token_s: float | None = None
    last_token_s: float | None = None
    ended_s: float | None = None
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    worker_id: str = ""

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.request.arrival_s

    @property
    def tpot_s(self) -> float | None:
        if self.first_token_s is None or self.last_token_s is None or self.num_output_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.num_output_tokens - 1)


@dataclass(slots=True)
class SimWorker:
    """An engine, its executor, and the step that is in flight there."""

    worker_id: str
    engine: Engine
    executor: SimExecutor
    handle: SimHandle | None = None
    started_s: float = 0.0
    num_preemptions: int = 0
    num_evictions: int = 0
    busy_s: float = 0.0
    pending: list[RequestOutput] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SimTimes:
    """What the machine around the executor costs: one hop between frontend and worker, and the loop around a step."""

    hop_s: float = 0.0003
    loop_s: float = 0.0005


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
    ) -> None:
        """`duration_of` maps the cost model's seconds of a step to those it takes (noise, a slower machine)."""
        self.clock = SimClock()
        self.gate = Gate(config)
        self.outcomes: dict[str, SimOutcome] = {}
        self.workers: dict[str, SimWorker] = {}
        self._times = times or SimTimes()
        self._duration_of = duration_of or (lambda seconds: seconds)
        self._hang_up_after: dict[str, int] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self._tick_s: float | None = None
        for i in range(num_workers):
            worker_id = f"w{i}"
            engine = Engine(info, config.scheduler, config.cache, batching=batching)
            self.workers[worker_id] = SimWorker(worker_id, engine, SimExecutor(info, cost))
            self._apply(self.gate.worker_ready(_worker_info(worker_id, info, config), 0.0))

    def run(self, arrivals: Iterable[SimArrival]) -> list[SimOutcome]:
        """Serve arrivals (in order of arrival_s) to the end. Outcomes in order of arrival."""
        source = iter(arrivals)
        self._next_arrival(source)
        while self._events:
            time_s, _, action = heapq.heappop(self._events)
            self.clock.advance_to(time_s)
            action()
        return list(self.outcomes.values())

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Do something at a time: what tests and faults use."""
        self._num_events += 1
        heapq.heappush(self._events, (time_s, self._num_events, action))

    # Clients.

    def _next_arrival(self, source: Iterator[SimArrival]) -> None:
        arrival = next(source, None)
        if arrival is not None:
            self.at(max(self.clock.now(), arrival.request.arrival_s), lambda: self._arrive(arrival, source))

    def _arrive(self, arrival: SimArrival, source: Iterator[SimArrival]) -> None:
        request = arrival.request
        self.outcomes[request.request_id] = SimOutcome(request)
        if arrival.hang_up_after is not None:
            self._hang_up_after[request.request_id] = arrival.hang_up_after
        self._apply(self.gate.submit(request, self.clock.now()))
        self._next_arrival(source)

    def _deliver(self, effect: Deliver) -> None:
        outcome = self.outcomes[effect.request_id]
        now = self.clock.now()
        for output in effect.outputs:
            if output.token_ids:
                if outcome.first_token_s is None:
                    outcome.first_token_s = now
                outcome.last_token_s = now
                outcome.num_output_tokens += len(output.token_ids)
            if output.prefill is not None:
                outcome.num_cached_tokens = output.prefill.num_cached_tokens
            if output.finish_reason is not None:
                outcome.ended_s = now
                reason = output.finish_reason
                outcome.outcome = "error" if reason is FinishReason.ERROR else str(reason)
        limit = self._hang_up_after.get(effect.request_id)
        if limit is not None and outcome.num_output_tokens >= limit and outcome.ended_s is None:
            outcome.outcome, outcome.ended_s = "hung_up", now
            self._apply(self.gate.cancel(effect.request_id, now))

    # The gate's effects.

    def _apply(self, effects: list[GateEffect]) -> None:
        now = self.clock.now()
        for effect in effects:
            match effect:
                case Dispatch(worker_id, request):
                    self.outcomes[request.request_id].worker_id = worker_id
                    self._send(worker_id, request)
                case CancelAtWorker(worker_id, request_id):
                    self._send(worker_id, request_id)
                case Deliver():
                    self._deliver(effect)
                case Refuse(request_id, reason):
                    self.outcomes[request_id].outcome = reason
                    self.outcomes[request_id].ended_s = now
        deadline_s = self.gate.next_deadline()
        if deadline_s is not None and (not self._tick_s or deadline_s < self._tick_s):
            self._tick_s = deadline_s
            self.at(max(now, deadline_s), self._tick)

    def _tick(self) -> None:
        self._tick_s = None
        self._apply(self.gate.tick(self.clock.now()))

    def _send(self, worker_id: str, message: object) -> None:
        worker = self.workers[worker_id]
        self.at(self.clock.now() + self._times.hop_s, lambda: self._receive(worker, message))

    # Workers. Like the real loop: messages are taken in when they come, plans are made between steps, and what a step
    # brought is sent when the next one has been launched.

    def _receive(self, worker: SimWorker, message: object) -> None:
        now = self.clock.now()
        if isinstance(message, Request):
            outputs = worker.engine.submit(message, now)
        else:
            outputs = worker.engine.cancel(str(message), now)
        if worker.handle is None:
            self._launch(worker, outputs, None)
        else:
            worker.pending += outputs

    def _launch(self, worker: SimWorker, outputs: list[RequestOutput], stats: StepStats | None) -> None:
        """Start the next step if there is one, and send what the one before brought."""
        now = self.clock.now()
        plan = worker.engine.schedule(now)
        if plan is not None:
            worker.handle = worker.executor.launch(plan)
            worker.started_s = now
            duration_s = self._duration_of(worker.handle.duration_s) + self._times.loop_s
            worker.busy_s += duration_s
            self.at(now + duration_s, lambda: self._step_ended(worker))
        elif (deadline_s := worker.engine.scheduler.deadline_s) is not None:
            self.at(deadline_s, lambda: self._wake(worker))
        report = StepReport("i", outputs, worker.engine.load(now), stats)
        self.at(
            now + self._times.hop_s,
            lambda: self._apply(self.gate.handle_report(worker.worker_id, report, self.clock.now())),
        )

    def _wake(self, worker: SimWorker) -> None:
        if worker.handle is None:
            self._launch(worker, [], None)

    def _step_ended(self, worker: SimWorker) -> None:
        handle, now = worker.handle, self.clock.now()
        assert handle is not None
        worker.handle = None
        result = worker.executor.collect(handle)
        result.compute_s = now - worker.started_s - self._times.loop_s
        outputs = worker.pending + worker.engine.apply(result, now)
        worker.pending = []
        plan = handle.plan
        preemptions, evictions = worker.engine.scheduler.stats.num_preemptions, worker.engine.pool.stats.num_evictions
        stats = StepStats(
            step_id=plan.step_id,
            start_s=worker.started_s,
            compute_s=result.compute_s,
            loop_s=now - worker.started_s,
            num_prefill_tokens=plan.num_prefill_tokens,
            num_decode_rows=plan.num_decode_rows,
            num_context_tokens=plan.num_context_tokens,
            num_preemptions=preemptions - worker.num_preemptions,
            num_evictions=evictions - worker.num_evictions,
        )
        worker.num_preemptions, worker.num_evictions = preemptions, evictions
        self._launch(worker, outputs, stats)


def _worker_info(worker_id: str, info: ExecutorInfo, config: Config) -> WorkerInfo:
    return WorkerInfo(
        worker_id=worker_id,
        incarnation="i",
        pid=0,
        version=__version__,
        protocol_version=PROTOCOL_VERSION,
        model=info.model,
        weight_digest=info.weight_digest,
        weight_format=info.weight_format,
        kv_cache_dtype=info.kv_cache_dtype,
        compute_dtype=info.compute_dtype,
        block_size=info.block_size,
        num_blocks=info.num_blocks,
        bytes_per_block=info.bytes_per_block,
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
    )
