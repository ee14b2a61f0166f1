"""Frontend: the Service that the api serves, and the shell around the gate.

    api ──submit/close──> Frontend ──verbs──> Gate ──effects──> Frontend ──Dispatch, Cancel──> worker
    api <── stream ────── Frontend <─────────────── Deliver, Refuse ── StepReport <─────────── worker

Owns: what each request holds (`_Held`: its place at the gate or worker, its stream, its timeline), the gate's timer,
health, and the metrics of requests. Never does: policy, or HTTP. One wake-up a request a step, and no task of its own.
Invariant: a request leaves the gate once (`_end`) and the books once (`record` with its outcome), however it ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from tidegate.admission.decision import AdmissionDecision, Downgrade
from tidegate.api.errors import ERROR_TABLE, Outcome, Refused, admission_text
from tidegate.api.service import Health, Served, ServedModel
from tidegate.api.tenancy import Tenancy
from tidegate.clock import Clock
from tidegate.config import Config, ConfigError
from tidegate.gate.effects import CancelAtWorker, Decided, Deliver, Dispatch, GateEffect, Refuse
from tidegate.gate.gate import Gate
from tidegate.metrics.registry import ServerMetrics
from tidegate.metrics.timeline import Timeline
from tidegate.request import FinishReason, InvalidRequest, Request, RequestOutput
from tidegate.worker.messages import Cancel, StepReport, Submit, WorkerInfo
from tidegate.worker.supervisor import WorkerSupervisor

_MAX_RECENT = 1024  # ended requests whose timelines can still be asked for
_LENGTH_IS_KNOWN = frozenset({Outcome.STOP, Outcome.LENGTH, Outcome.CLAMPED, Outcome.CANCELLED})

log = logging.getLogger("tidegate.frontend")


class RequestStream:
    """The outputs of one request as they come; see OutputStream."""

    def __init__(self, frontend: Frontend, request_id: str) -> None:
        self._frontend = frontend
        self._request_id = request_id
        self._outputs: list[RequestOutput] = []
        self._refused: Refused | None = None
        self.served: Served | None = None
        self._has_ended = False
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> list[RequestOutput]:
        while True:
            if self._outputs:
                outputs, self._outputs = self._outputs, []
                return outputs
            if self._refused is not None:
                refused, self._refused = self._refused, None
                raise refused
            if self._has_ended:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def close(self) -> None:
        self._outputs = []
        self._refused = None
        self._frontend.close_request(self._request_id)

    def push(self, outputs: list[RequestOutput]) -> None:
        self._outputs += outputs
        self._wake()

    def end(self, refused: Refused | None = None) -> None:
        self._has_ended = True
        self._refused = refused
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


@dataclass(slots=True)
class _Held:
    """All that a request holds here, as it was asked for. `is_live`: the gate, and perhaps a worker, still has it."""

    request: Request
    stream: RequestStream
    timeline: Timeline
    num_open_choices: int
    is_live: bool = True
    tier: str = "default"
    quota_changes: tuple[str, ...] = ()


class Frontend:
    """Implements Service for the api, and WorkerListener for the supervisors of its workers."""

    def __init__(
        self, config: Config, gate: Gate, metrics: ServerMetrics, clock: Clock, tenancy: Tenancy | None = None
    ) -> None:
        self._tenancy = tenancy or Tenancy(config, clock)
        self.metrics = metrics
        self.model: ServedModel | None = None
        self._config = config
        self._gate = gate
        self._clock = clock
        self._held: dict[str, _Held] = {}
        self._recent: OrderedDict[str, Timeline] = OrderedDict()
        self._workers: dict[str, WorkerSupervisor] = {}
        self._ready: dict[str, WorkerInfo] = {}
        self._first_ready: asyncio.Future[WorkerInfo] = asyncio.get_running_loop().create_future()
        self._loading_message = "starting"
        self._is_draining = False
        self._only_observes = config.gate.admission == "observe"
        self._last_progress_s = clock.now()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s: float | None = None

    # Start and stop, for whoever runs the server.

    def add_worker(self, worker: WorkerSupervisor) -> None:
        self._workers[worker.worker_id] = worker
        worker.start()

    async def first_worker(self) -> WorkerInfo:
        """Wait for a worker that is ready. Raises ConfigError with its one line when it cannot start."""
        return await asyncio.shield(self._first_ready)

    async def stop(self) -> None:
        """End what is still here, and the workers. The server has drained before."""
        self._is_draining = True
        for held in list(self._held.values()):
            self._end(held, Refused(Outcome.DRAINING, "the server has shut down"))
        if self._timer is not None:
            self._timer.cancel()
        await asyncio.gather(*(worker.stop() for worker in self._workers.values()))
        if not self._first_ready.done():
            self._first_ready.cancel()

    # Service.

    def submit(self, request: Request) -> RequestStream:
        if self.model is None:
            raise Refused(Outcome.LOADING, f"the model is loading: {self._loading_message}")
        now = self._clock.now()
        timeline = Timeline(
            request_id=request.request_id,
            received_s=request.arrival_s,
            tenant=request.tenant,
            tier=request.tier,
            num_prompt_tokens=request.num_prompt_tokens,
            queued_s=now,
        )
        asked = request
        request, changes = self._tenancy.admit(asked)
        stream = RequestStream(self, request.request_id)
        held = _Held(asked, stream, timeline, request.params.n, tier=request.tier, quota_changes=changes)
        self._held[request.request_id] = held
        if self._gate.num_dispatched == 0:
            self._last_progress_s = now
        try:
            refused = self._apply(self._gate.submit(request, now), submitting=held)
        except InvalidRequest as error:
            refused = Refused.of(error)
        if refused is not None:
            # Never served: the outcome that the api records is all that will be said of it.
            del self._held[request.request_id]
            self._tenancy.end(asked)
            self._tenancy.count(asked.tenant, asked.tier, f"refusals:{refused.outcome}")
            raise refused
        return stream

    @property
    def tier_names(self) -> tuple[str, ...]:
        return self._gate.tier_names

    def refuse_early(self, request: Request) -> None:
        if self.model is None:
            return  # submit says it
        self._tenancy.refuse_early(request)
        try:
            refusal = self._gate.would_refuse(request, self._clock.now())
        except InvalidRequest as error:
            raise Refused.of(error) from None
        if refusal is not None:
            self._tell_refusal(refusal, request, "reject")
            raise _refused(refusal)

    def health(self) -> Health:
        if self._is_draining:
            return Health("draining", f"{len(self._held)} requests are left")
        if self.model is None:
            return Health("loading", self._loading_message)
        if not self._ready:
            return Health("no_workers", self._loading_message)
        num_requests = self._gate.num_dispatched + self._gate.num_waiting
        idle_s = self._clock.now() - self._last_progress_s
        if num_requests and idle_s > self._config.server.stall_timeout:
            return Health("stalled", f"{num_requests} requests, and no step for {idle_s:.0f} s")
        return Health("ready")

    def timeline(self, request_id: str) -> dict[str, Any] | None:
        held = self._held.get(request_id)
        timeline = self._recent.get(request_id) if held is None else held.timeline
        return None if timeline is None else timeline.as_dict(self._clock.now())

    def record(
        self,
        request_id: str,
        *,
        tokenized_s: float | None = None,
        first_byte_s: float | None = None,
        outcome: Outcome | None = None,
    ) -> None:
        held = self._held.get(request_id)
        if held is None:
            if outcome is not None:
                self.metrics.count_outcome(outcome)
            return
        timeline = held.timeline
        if tokenized_s is not None:
            timeline.tokenized_s = tokenized_s
        if first_byte_s is not None and timeline.first_byte_s is None:
            timeline.first_byte_s = first_byte_s
        if outcome is not None:
            self._end(held)
            self._close_books(held, outcome)

    def _close_books(self, held: _Held, outcome: Outcome) -> None:
        timeline = held.timeline
        timeline.finish(outcome, self._clock.now())
        request = held.request
        if ERROR_TABLE.get(outcome) is not None and timeline.num_output_tokens == 0:
            self._tenancy.count(request.tenant, held.tier, f"refusals:{outcome}")
        else:
            self._tenancy.count(request.tenant, held.tier, f"requests:{outcome}")
        self.metrics.observe_timeline(timeline)
        self._judge(timeline, outcome)
        del self._held[timeline.request_id]
        self._recent[timeline.request_id] = timeline
        if len(self._recent) > _MAX_RECENT:
            self._recent.popitem(last=False)

    def _judge(self, timeline: Timeline, outcome: Outcome) -> None:
        """What was predicted of the whole answer; its first token has been judged when it came."""
        predicted = timeline.decision
        if timeline.num_output_tokens == 0 or "predicted_tpot_ms" not in predicted:
            return
        tier, admission = predicted["served_tier"], self.metrics.admission
        if timeline.tpot_s is not None:
            admission.judge("tpot", tier, predicted["predicted_tpot_ms"] / 1e3, timeline.tpot_s)
        if outcome in _LENGTH_IS_KNOWN:
            for num_tokens in timeline.num_output_tokens_per_choice:
                admission.judge_length(tier, predicted["expected_output_p90"], num_tokens)

    # How a request leaves.

    def close_request(self, request_id: str) -> None:
        """Its client needs no more of it. Idempotent."""
        held = self._held.get(request_id)
        if held is not None:
            self._end(held)

    def _end(self, held: _Held, refused: Refused | None = None, *, has_left_gate: bool = False) -> None:
        """The one place where a request gives back its place at the gate and its stream."""
        if not held.is_live:
            return
        held.is_live = False
        self._tenancy.end(held.request)
        if not has_left_gate:
            self._apply(self._gate.cancel(held.request.request_id, self._clock.now()))
        held.stream.end(refused)

    # The gate's effects.

    def _apply(self, effects: list[GateEffect], *, submitting: _Held | None = None) -> Refused | None:
        """Do what the gate asks. Returns the refusal of the request that is being submitted, if it is refused."""
        at_once: Refused | None = None
        for effect in effects:
            match effect:
                case Decided(request, decision):
                    self._decided(request, decision)
                case Deliver(request_id, outputs):
                    self._deliver(request_id, outputs)
                case Dispatch(worker_id, request):
                    self._dispatch(worker_id, request)
                case CancelAtWorker(worker_id, request_id):
                    self._workers[worker_id].send(Cancel(request_id))
                case Refuse(request_id):
                    held = self._held.get(request_id)
                    if held is None:
                        continue
                    refused = _refused(effect)
                    if effect.outcome != Outcome.WORKER_FAILED:
                        self._tell_refusal(effect, held.request, "reject" if held is submitting else "expire")
                        held.timeline.decision = {"action": "reject", "reason": effect.outcome, **effect.numbers}
                    if held is submitting:
                        at_once = refused
                    self._end(held, refused, has_left_gate=True)
        self.metrics.set_queued(self._gate.num_waiting)
        self._set_timer()
        return at_once

    def _decided(self, request: Request, decision: AdmissionDecision) -> None:
        """`request` is how it is served, which may differ from what was asked for."""
        held = self._held[request.request_id]
        asked = held.request
        action = type(decision).__name__.lower()
        changes = (*held.quota_changes, *(decision.changes if isinstance(decision, Downgrade) else ()))
        if changes:
            self._tenancy.count(asked.tenant, asked.tier, "downgrades")
            action = "downgrade"
        held.tier = request.tier
        self.metrics.admission.count(action, decision.reason, asked.tier)
        text = admission_text(action, decision.reason, decision.numbers, changes)
        held.stream.served = Served(
            tier=request.tier,
            decision=f"observe; would={text}" if self._only_observes else text,
            is_clamped=request.max_tokens < asked.max_tokens,
        )
        held.timeline.decision = {
            "action": action,
            "reason": decision.reason,
            "is_enforced": not self._only_observes,
            **({"changes": list(changes)} if changes else {}),
            "served_tier": request.tier,
            "max_tokens": request.max_tokens,
            **decision.numbers,
        }
        log.debug("request %s (%s): %s", request.request_id, asked.tier, held.timeline.decision)

    def _tell_refusal(self, refusal: Refuse, request: Request, action: str) -> None:
        self.metrics.admission.count(action, refusal.outcome, request.tier)
        log.debug(
            "request %s (%s): %s, %s (%s) %s",
            request.request_id, request.tier, action, refusal.outcome, refusal.message, refusal.numbers,
        )  # fmt: skip

    def _dispatch(self, worker_id: str, request: Request) -> None:
        held = self._held.get(request.request_id)
        if held is not None and held.timeline.first_output_s is None:  # else it is a replay, which changes no TTFT
            held.timeline.dispatched_s = self._clock.now()
        self._workers[worker_id].send(Submit(request))

    def _deliver(self, request_id: str, outputs: list[RequestOutput]) -> None:
        held = self._held.get(request_id)
        if held is None or not held.is_live:
            return
        now = self._clock.now()
        has_failed = False
        for output in outputs:
            held.timeline.on_output(output, now)
            self._tenancy.produced(
                held.request,
                held.tier,
                len(output.token_ids),
                num_cached_tokens=None if output.prefill is None else output.prefill.num_cached_tokens,
            )
            if output.finish_reason is not None:
                held.num_open_choices -= 1
                has_failed |= output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT)
        held.stream.push(outputs)
        # A request that fails before its choices have parted has one output for all of them.
        if has_failed or held.num_open_choices <= 0:
            self._end(held, has_left_gate=not has_failed)

    def _set_timer(self) -> None:
        deadline_s = self._gate.next_deadline()
        if deadline_s == self._timer_s:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_s = None, deadline_s
        if deadline_s is not None:
            delay_s = max(0.0, deadline_s - self._clock.now())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self._timer, self._timer_s = None, None
        self._apply(self._gate.tick(self._clock.now()))

    def reconfigure(self, config: Config) -> None:
        """Other tiers and gate settings, for what comes from now on."""
        self._only_observes = config.gate.admission == "observe"
        self._gate.reconfigure(config)
        self._tenancy.reconfigure(config)

    # WorkerListener.

    def worker_loading(self, worker_id: str, message: str) -> None:
        self._loading_message = message
        log.debug("worker %s: %s", worker_id, message)

    def worker_ready(self, info: WorkerInfo) -> None:
        self._ready[info.worker_id] = info
        self._last_progress_s = self._clock.now()
        if not self._first_ready.done():
            self._first_ready.set_result(info)
        self._apply(self._gate.worker_ready(info, self._clock.now()))

    def worker_report(self, worker_id: str, report: StepReport) -> None:
        now = self._clock.now()
        self.metrics.set_load(report.load, worker_id)
        if report.stats is not None:
            self._last_progress_s = now
            self.metrics.observe_step(report.stats)
        self._apply(self._gate.handle_report(worker_id, report, now))
        judged, self._gate.judged = self._gate.judged, []
        for tier, predicted_s, actual_s in judged:
            self.metrics.admission.judge("ttft", tier, predicted_s, actual_s)

    def worker_lost(self, worker_id: str, message: str) -> None:
        self._loading_message = message
        self._ready.pop(worker_id, None)
        self.metrics.drop_worker(worker_id)
        self._apply(self._gate.worker_lost(worker_id, self._clock.now()))

    def worker_failed(self, worker_id: str, message: str) -> None:
        self._loading_message = message
        if not self._first_ready.done():
            self._first_ready.set_exception(ConfigError(message))
        else:
            log.error("worker %s cannot start again: %s", worker_id, message)


def _refused(refusal: Refuse) -> Refused:
    is_decided = refusal.outcome != Outcome.WORKER_FAILED
    return Refused(
        Outcome(refusal.outcome),
        refusal.message,
        retry_after_s=refusal.retry_after_s,
        numbers=refusal.numbers if is_decided else None,
    )
