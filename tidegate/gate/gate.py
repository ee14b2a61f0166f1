"""The one waiting queue of the fleet, and the hand that gives requests to workers.

    submit ─> decide ─┬─ Reject ──> Refuse
                      └─ served ──> queue ─── a worker can soon use it ──> Dispatch ──> reports ──> Deliver
                                      └─ its objective is out of reach ──> downgraded, or Refuse in time

Requests wait here, where order, expiry and admission can still act, and not inside engines: a worker is given what its
slots and next steps can take, and a short look-ahead. Sans-I/O: each verb returns effects for the shell to carry out.

Invariant: a request is in the queue or dispatched to exactly one worker, until its last effect (Refuse, or the Deliver
that ends its last choice) has been returned; then the gate has forgotten it. A cancelled request gets no more effects,
but counts as load until its worker has confirmed that it is gone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import ceil

import msgspec

from tidegate.admission.class_share import ClassShare
from tidegate.admission.controller import Prediction, apply_downgrade, decide, decide_by_bounds
from tidegate.admission.decision import Downgrade, Reject
from tidegate.config import Config
from tidegate.cost_model import CostModel
from tidegate.gate.dispatched import Dispatched, WorkerView
from tidegate.gate.effects import CancelAtWorker, Decided, Deliver, Dispatch, GateEffect, Refuse
from tidegate.gate.fair_order import FairOrder
from tidegate.gate.look_ahead import LookAhead
from tidegate.gate.order import order_key, order_name
from tidegate.gate.prediction import Predictor
from tidegate.gate.queue import QueuedRequest, WaitingQueue
from tidegate.metrics.load_snapshot import LoadSnapshot, StepStats
from tidegate.request import FinishReason, InvalidRequest, Request, RequestOutput
from tidegate.routing.registry import WorkerRegistry
from tidegate.worker.messages import StepReport, WorkerInfo


class Gate:
    def __init__(self, config: Config) -> None:
        self._config = config.gate
        self._tiers = dict(config.tiers)
        self._offered = tuple(config.tiers)
        self._step_is_paced = config.scheduler.step == "adaptive"
        self._queue = WaitingQueue()
        self._registry = WorkerRegistry()
        self._views: dict[str, WorkerView] = {}
        self._dispatched: dict[str, Dispatched] = {}
        self._predictor = Predictor(config.gate, self._step_is_paced)
        self._order = order_name(config)
        self._fair = FairOrder(config.tenants, config.gate) if self._order == "fair" else None
        self._predictor.fair = self._fair
        self._share = ClassShare()
        self._is_draining = False
        self._num_arrived = 0
        # For the shell's metrics, which takes and clears them: (tier, predicted, actual) of each first token.
        self.judged: list[tuple[str, float, float]] = []

    # What clients do.

    def submit(self, request: Request, now: float) -> list[GateEffect]:
        """Take a request in. The first effect is its refusal, or what was decided. Raises InvalidRequest for a tier
        that does not exist."""
        request = self._with_tier(request)
        if self._fair is not None:
            self._fair.seen(request.tenant, now)
        load = self._load_for(request, now)
        verdict = decide(request, load, self._tiers, self._config, lambda r: self.predict(r, now))
        decision, served = verdict.decision, verdict.request
        if isinstance(decision, Reject) and decision.reason in _PREDICTED and decision.reason != "long_share":
            self._share.refused(now)
        enforced = decision
        if self._config.admission == "observe":  # what was decided is reported; what is done is what "off" would do
            enforced, served = decide_by_bounds(request, load, self._config), request
        if isinstance(enforced, Reject):
            return [_refuse(request.request_id, enforced)]
        self._share.admitted(served.num_prompt_tokens, is_long=served.num_prompt_tokens >= self._config.long_prompt)
        self._num_arrived += 1
        queued = QueuedRequest(self._with_order(served), self._num_arrived, rank=served.priority)
        queued.prediction = verdict.prediction
        queued.due = self._due(served, now)
        self._enqueue(queued)
        return [Decided(served, decision), *self._dispatch_all()]

    def would_refuse(self, request: Request, now: float) -> Refuse | None:
        """The refusal of a request with at least this prompt, if it came now; for before a prompt is tokenized. Changes
        nothing: what is not refused here is still to be submitted. Raises InvalidRequest like submit."""
        request = self._with_tier(request)
        load = self._load_for(request, now)
        if self._config.admission == "on":
            decision = decide(request, load, self._tiers, self._config, lambda r: self.predict(r, now)).decision
        else:
            decision = decide_by_bounds(request, load, self._config)
        return _refuse(request.request_id, decision) if isinstance(decision, Reject) else None

    def cancel(self, request_id: str, now: float) -> list[GateEffect]:
        """The client went away, or has all it wants. Unknown ids do nothing."""
        if self._dequeue(request_id):
            return []
        dispatched = self._dispatched.get(request_id)
        if dispatched is None or dispatched.is_cancelled:
            return []
        dispatched.is_cancelled = True
        if dispatched.num_output_tokens:
            self._predictor.lengths_of(dispatched.request).observe(dispatched.num_output_tokens)
        return [CancelAtWorker(dispatched.worker_id, request_id)]

    # What workers do.

    def worker_ready(self, info: WorkerInfo, now: float) -> list[GateEffect]:
        entry = self._registry.add(info)
        self._views[info.worker_id] = WorkerView(
            entry, LookAhead(info.max_num_seqs), self._step_is_paced, CostModel(info.step_cost)
        )
        self._count_slots()
        return self._dispatch_all()

    def worker_lost(self, worker_id: str, now: float) -> list[GateEffect]:
        """A worker is gone. What it had begun ends with an error; what it had not goes back to its place."""
        if self._registry.remove(worker_id) is None:
            return []
        effects: list[GateEffect] = []
        for request_id, dispatched in self._views.pop(worker_id).dispatched.items():
            del self._dispatched[request_id]
            self._gave_back(dispatched, dispatched.num_open_choices)
            if dispatched.is_cancelled:
                continue
            if dispatched.first_token_s is not None:
                effects.append(Refuse(request_id, "worker_failed", "the worker that computed this answer ended"))
            else:
                if self._fair is not None:
                    self._fair.taken_back(dispatched.queued)
                self._enqueue(dispatched.queued)
        self._count_slots()
        return effects + self._dispatch_all()

    def handle_report(self, worker_id: str, report: StepReport, now: float) -> list[GateEffect]:
        """A step's outputs and the load after it. Reports of an incarnation that is not current are dropped."""
        view = self._views.get(worker_id)
        if view is None or view.entry.info.incarnation != report.incarnation:
            return []
        view.entry.load = report.load
        by_request: dict[str, list[RequestOutput]] = defaultdict(list)
        num_ended = 0
        for output in report.outputs:
            by_request[output.request_id].append(output)
            num_ended += output.finish_reason is not None
        effects: list[GateEffect] = []
        for request_id, outputs in by_request.items():
            if self._book(view, request_id, outputs, now):
                effects.append(Deliver(request_id, outputs))
        if report.stats is not None:
            view.observe(report.stats, num_ended, now)
        return effects + self._dispatch_all()

    def handle_unchanged_steps(
        self, worker_id: str, report: StepReport, steps: Sequence[tuple[StepStats, float]]
    ) -> list[GateEffect]:
        """As handle_report for each of `steps` (with the time its report came), in which nothing began and nothing
        ended: `report` holds what they brought together, and the load after the last. Nothing is dispatched: where no
        worker could take a request before, none can now, since a look-ahead only shrinks while nothing ends."""
        view = self._views.get(worker_id)
        if view is None or view.entry.info.incarnation != report.incarnation:
            return []
        view.entry.load = report.load
        for stats, now in steps:
            view.observe(stats, 0, now)
        now = steps[-1][1]
        return [
            Deliver(output.request_id, [output])
            for output in report.outputs
            if self._book(view, output.request_id, [output], now)
        ]

    # What the shell does.

    def tick(self, now: float) -> list[GateEffect]:
        """See to what is due: requests that age, or that can no longer be served in time. Call at next_deadline()."""
        effects: list[GateEffect] = []
        for what, queued in self._queue.pop_due(now):
            if what == "age":
                self._queue.move_up(queued)
                if self._fair is not None:
                    self._fair.moved(queued, self._queue)
            else:
                effects += self._too_late(queued, now)
        return effects + self._dispatch_all()

    def next_deadline(self) -> float | None:
        return self._queue.next_due_s()

    def drain(self, now: float) -> list[GateEffect]:
        """Take nothing new from now on; what has been taken is served."""
        self._is_draining = True
        return []

    def reconfigure(self, config: Config) -> None:
        """Other tiers and gate settings from now on; what waits already keeps the objectives it came with."""
        self._config = config.gate
        self._predictor.reconfigure(config.gate)
        if self._fair is not None:
            self._fair.reconfigure(config.tenants, config.gate)
        self._offered = tuple(config.tiers)
        self._tiers |= config.tiers  # one that is no longer offered may still be that of a request that waits

    @property
    def tier_names(self) -> tuple[str, ...]:
        """The tiers that a request may ask for."""
        return self._offered

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def num_dispatched(self) -> int:
        return len(self._dispatched)

    def snapshot(self, now: float) -> LoadSnapshot:
        views = self._views.values()
        return LoadSnapshot(
            num_queued=len(self._queue),
            num_free_places=sum(
                view.entry.info.max_num_seqs + view.look_ahead.num_requests - view.num_choices for view in views
            ),
            num_workers=len(self._views),
            max_request_tokens=max((view.entry.max_request_tokens for view in views), default=0),
            is_draining=self._is_draining,
            queued_by_tier=self._queue.num_by_tier,
            long_share=self._share.long_share(now),
        )

    def predict(self, request: Request, now: float) -> Prediction:
        """What the request would see on the worker that would serve it soonest."""
        probe = QueuedRequest(self._with_order(request), self._num_arrived + 1, rank=request.priority)
        probe.is_borrowing = self._fair is not None and self._fair.borrows(request.tenant)
        return self._predictor.predict(probe, self._queue, list(self._views.values()), now)

    # Inside.

    def _enqueue(self, queued: QueuedRequest) -> None:
        if self._fair is not None:
            request = queued.request
            expected = self._predictor.lengths_of(request).expected_remaining(0, request.max_tokens)
            queued.fair_cost = self._fair.cost(request.tenant, request.num_prompt_tokens, expected)
            queued.request = self._with_order(request)
        self._queue.push(queued)
        if self._fair is not None:
            self._fair.joined(queued, self._queue)

    def _dequeue(self, request_id: str) -> bool:
        """Take a request out of the queue. Whether it was there."""
        queued = self._queue.remove(request_id)
        if queued is not None and self._fair is not None:
            self._fair.left(queued)
        return queued is not None

    def _gave_back(self, dispatched: Dispatched, num_slots: int) -> None:
        if self._fair is not None:
            self._fair.gave_back(dispatched.request.tenant, num_slots)

    def _count_slots(self) -> None:
        if self._fair is not None:
            self._fair.num_slots_total = sum(view.entry.info.max_num_seqs for view in self._views.values())

    def _load_for(self, request: Request, now: float) -> LoadSnapshot:
        """The load as it counts for this request. Where tenants take turns, each has its share of the queue, and what
        the others have in it neither counts nor is told."""
        load = self.snapshot(now)
        if self._fair is None:
            return load
        share = self._fair.share(request.tenant)
        num_own = {tier: ceil(self._queue.num_of(request.tenant, tier) / share) for tier in self._tiers}
        return msgspec.structs.replace(load, num_queued=sum(num_own.values()), queued_by_tier=num_own)

    def _with_tier(self, request: Request) -> Request:
        """The request with its tier's rank and the tier's objectives where it brings none of its own."""
        tier = self._tiers.get(request.tier)
        if tier is None or request.tier not in self._offered:
            raise InvalidRequest(
                f"unknown service tier {request.tier!r}; allowed: {', '.join(self._offered)}", param="service_tier"
            )
        return msgspec.structs.replace(
            request,
            priority=tier.rank,
            ttft_slo_s=tier.ttft_slo if request.ttft_slo_s is None else request.ttft_slo_s,
            tpot_slo_s=tier.tpot_slo if request.tpot_slo_s is None else request.tpot_slo_s,
        )

    def _with_order(self, request: Request) -> Request:
        if self._order == "fair":
            assert self._fair is not None
            key = self._fair.waiting_key(request.tenant)
        else:
            key = order_key(self._order, request)
        return request if request.order_key == key else msgspec.structs.replace(request, order_key=key)

    def _due(self, request: Request, now: float) -> list[tuple[float, str]]:
        """When a request that waits from now on must be seen to."""
        expire_s = now + self._config.queue_timeout
        if request.ttft_slo_s is not None and self._config.admission == "on":
            views = self._views.values()
            own_s = min((view.cost_model.predict(request.num_prompt_tokens, 0, 0) for view in views), default=0.0)
            expire_s = min(expire_s, max(now, request.arrival_s + request.ttft_slo_s - own_s))
        due = [(expire_s, "expire")]
        if request.priority > 0:
            due.append((now + self._tiers[request.tier].age_after, "age"))
        return due

    def _too_late(self, queued: QueuedRequest, now: float) -> list[GateEffect]:
        """A request has waited until its objective is out of reach (or the queue's bound): downgrade it, or answer."""
        request = queued.request
        self._dequeue(request.request_id)
        if now >= request.arrival_s + self._config.queue_timeout:
            message = f"no worker could take the request within {self._config.queue_timeout:g} s"
            return [Refuse(request.request_id, "queue_timeout", message)]
        tried: list[str] = []
        served = request
        for action in self._tiers[request.tier].downgrade:
            served = apply_downgrade(served, action, self._tiers)
            tried.append(action)
            expire_s, _ = self._due(served, now)[0]
            if expire_s > now:
                queued.request = self._with_order(served)
                queued.rank = served.priority
                queued.due = self._due(served, now)
                self._enqueue(queued)
                return [Decided(served, Downgrade("ttft_unreachable", tuple(tried)))]
        message = f"the first token cannot come within the objective of {request.ttft_slo_s:g} s any more"
        return [Refuse(request.request_id, "ttft_unreachable", message)]

    def _dispatch_all(self) -> list[GateEffect]:
        """Give requests away, in order, for as long as a worker can soon use them. One that no worker can take now is
        overtaken only by those that need not wait for the same thing (a long prefill's turn)."""
        effects: list[GateEffect] = []
        for queued in self._queue.first(_MAX_TRIED) if self._fair is None else self._fair.hand_out(self._queue):
            takers = [view for view in self._views.values() if view.can_take(queued, self._config)]
            if not takers:
                if queued.request.num_prompt_tokens >= self._config.long_prompt:
                    continue
                break
            view = min(takers, key=lambda view: view.num_choices / view.entry.info.max_num_seqs)
            self._dequeue(queued.request.request_id)
            if self._fair is not None:
                queued.request = msgspec.structs.replace(
                    queued.request,
                    order_key=self._fair.handed_out(queued),
                    is_borrowing=queued.is_borrowing and self._config.fair_slots == "preempt",
                )
            request = queued.request
            dispatched = Dispatched(queued, view.entry.info.worker_id, request.params.n)
            view.dispatched[request.request_id] = dispatched
            self._dispatched[request.request_id] = dispatched
            effects.append(Dispatch(view.entry.info.worker_id, request))
        return effects

    def _book(self, view: WorkerView, request_id: str, outputs: list[RequestOutput], now: float) -> bool:
        """Count the tokens and the choices that ended. Whether the outputs are to be delivered."""
        dispatched = view.dispatched.get(request_id)
        if dispatched is None:
            return False
        if dispatched.first_token_s is None and any(output.token_ids for output in outputs):
            self._first_token(dispatched, now)
        dispatched.num_output_tokens += sum(len(output.token_ids) for output in outputs if output.index == 0)
        num_open = dispatched.num_open_choices
        dispatched.num_open_choices -= sum(output.finish_reason is not None for output in outputs)
        # A request that is refused as a whole answers once, whatever its n; so does one cancelled before it forked.
        is_over = any(output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT) for output in outputs)
        if is_over or dispatched.num_open_choices <= 0:
            dispatched.num_open_choices = 0
            del self._dispatched[request_id]
            del view.dispatched[request_id]
            if not dispatched.is_cancelled and not is_over:
                self._predictor.lengths_of(dispatched.request).observe(dispatched.num_output_tokens)
        if self._fair is not None:
            num_cached = sum(output.prefill.num_cached_tokens for output in outputs if output.prefill is not None)
            self._fair.produced(dispatched.queued, num_cached, sum(len(output.token_ids) for output in outputs))
            self._gave_back(dispatched, num_open - dispatched.num_open_choices)
        return not dispatched.is_cancelled

    def _first_token(self, dispatched: Dispatched, now: float) -> None:
        """Judge the prediction that was frozen when the request came."""
        dispatched.first_token_s = now
        request, prediction = dispatched.request, dispatched.queued.prediction
        if prediction is not None and not dispatched.is_cancelled:
            self.judged.append((request.tier, prediction.ttft_s, now - request.arrival_s))
            self._predictor.judge(dispatched.queued, now)


_MAX_TRIED = 64  # queued requests that are looked at for one that a worker can use
_PREDICTED = ("ttft_unreachable", "tpot_unreachable", "others_ttft", "long_share")


def _refuse(request_id: str, decision: Reject) -> Refuse:
    return Refuse(request_id, decision.reason, decision.message, decision.retry_after_s, decision.numbers)
