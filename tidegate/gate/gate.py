"""The one waiting queue of the fleet, and the hand that gives requests to workers.

    submit ─> decide ─┬─ Reject ──> Refuse
                      └─ wait ────> queue ─── a worker can soon use it ──> Dispatch ──> reports ──> Deliver

Requests wait here, where order, expiry and admission can still act, and not inside engines: a worker is given what its
slots can take, and a short look-ahead (look_ahead.py). Sans-I/O: each verb returns effects for the shell to carry out.

Invariant: a request is in the queue or outstanding at exactly one worker, until its last effect (Refuse, or the Deliver
that ends its last choice) has been returned; then the gate has forgotten it. A cancelled request gets no more effects,
but counts as load until its worker has confirmed that it is gone.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from tidegate.admission.controller import decide
from tidegate.admission.decision import Reject
from tidegate.config import GateConfig
from tidegate.gate.effects import CancelAtWorker, Deliver, Dispatch, GateEffect, Refuse
from tidegate.gate.look_ahead import LookAhead
from tidegate.gate.queue import QueuedRequest, WaitingQueue
from tidegate.metrics.load_snapshot import LoadSnapshot
from tidegate.request import FinishReason, Request, RequestOutput
from tidegate.routing.choice import least_load
from tidegate.routing.registry import WorkerEntry, WorkerRegistry
from tidegate.worker.messages import StepReport, WorkerInfo


@dataclass(slots=True)
class _Dispatched:
    queued: QueuedRequest
    worker_id: str
    num_open_choices: int
    has_output: bool = False
    is_cancelled: bool = False


class Gate:
    def __init__(self, config: GateConfig) -> None:
        self._config = config
        self._queue = WaitingQueue()
        self._workers = WorkerRegistry()
        self._look_ahead: dict[str, LookAhead] = {}
        self._dispatched: dict[str, _Dispatched] = {}
        self._is_draining = False

    # What clients do.

    def submit(self, request: Request, now: float) -> list[GateEffect]:
        """Take a request in. The first effect may already be its refusal or its dispatch."""
        decision = decide(request, self.snapshot(), self._config)
        if isinstance(decision, Reject):
            return [Refuse(request.request_id, decision.reason, decision.message, decision.retry_after_s)]
        self._queue.push(request, now + self._config.queue_timeout)
        return self._dispatch_all()

    def cancel(self, request_id: str, now: float) -> list[GateEffect]:
        """The client went away, or has all it wants. Unknown ids do nothing."""
        if self._queue.remove(request_id) is not None:
            return []
        dispatched = self._dispatched.get(request_id)
        if dispatched is None or dispatched.is_cancelled:
            return []
        dispatched.is_cancelled = True
        return [CancelAtWorker(dispatched.worker_id, request_id)]

    # What workers do.

    def worker_ready(self, info: WorkerInfo, now: float) -> list[GateEffect]:
        self._workers.add(info)
        self._look_ahead[info.worker_id] = LookAhead(info.max_num_seqs)
        return self._dispatch_all()

    def worker_lost(self, worker_id: str, now: float) -> list[GateEffect]:
        """A worker is gone. What it had begun ends with an error; what it had not goes back to its place."""
        worker = self._workers.remove(worker_id)
        if worker is None:
            return []
        del self._look_ahead[worker_id]
        effects: list[GateEffect] = []
        for request_id in worker.outstanding:
            dispatched = self._dispatched.pop(request_id)
            if dispatched.is_cancelled:
                continue
            if dispatched.has_output:
                effects.append(Refuse(request_id, "worker_failed", "the worker that computed this answer ended"))
            else:
                self._queue.push_back(dispatched.queued)
        return effects + self._dispatch_all()

    def handle_report(self, worker_id: str, report: StepReport, now: float) -> list[GateEffect]:
        """A step's outputs and the load after it. Reports of an incarnation that is not current are dropped."""
        worker = self._workers.get(worker_id)
        if worker is None or worker.info.incarnation != report.incarnation:
            return []
        worker.load = report.load
        by_request: dict[str, list[RequestOutput]] = defaultdict(list)
        num_ended = 0
        for output in report.outputs:
            by_request[output.request_id].append(output)
            num_ended += output.finish_reason is not None
        effects: list[GateEffect] = []
        for request_id, outputs in by_request.items():
            if self._book(worker, request_id, outputs):
                effects.append(Deliver(request_id, outputs))
        if report.stats is not None:
            hop_s = now - (report.stats.start_s + report.stats.compute_s)
            self._look_ahead[worker_id].observe_step(report.stats.loop_s, num_ended, hop_s)
        return effects + self._dispatch_all()

    # What the shell does.

    def tick(self, now: float) -> list[GateEffect]:
        """Refuse what has waited too long. To be called at next_deadline()."""
        return [
            Refuse(
                queued.request.request_id,
                "queue_timeout",
                f"no worker could take the request within {self._config.queue_timeout:g} s",
            )
            for queued in self._queue.pop_expired(now)
        ]

    def next_deadline(self) -> float | None:
        return self._queue.next_deadline()

    def drain(self, now: float) -> list[GateEffect]:
        """Take nothing new from now on; what has been taken is served."""
        self._is_draining = True
        return []

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def num_dispatched(self) -> int:
        return len(self._dispatched)

    def snapshot(self) -> LoadSnapshot:
        workers = self._workers.all()
        return LoadSnapshot(
            num_queued=len(self._queue),
            num_free_places=sum(max(0, self._num_free_places(worker)) for worker in workers),
            num_workers=len(workers),
            max_request_tokens=max((worker.max_request_tokens for worker in workers), default=0),
            is_draining=self._is_draining,
        )

    # Inside.

    def _dispatch_all(self) -> list[GateEffect]:
        """Give the head of the queue away for as long as some worker can soon use it."""
        effects: list[GateEffect] = []
        while (queued := self._queue.peek()) is not None:
            worker = least_load(
                worker
                for worker in self._workers.all()
                if self._num_free_places(worker) > 0 and queued.request.max_total_tokens <= worker.max_request_tokens
            )
            if worker is None:
                break
            self._queue.pop()
            request = queued.request
            worker.outstanding[request.request_id] = request.params.n
            self._dispatched[request.request_id] = _Dispatched(queued, worker.info.worker_id, request.params.n)
            effects.append(Dispatch(worker.info.worker_id, request))
        return effects

    def _num_free_places(self, worker: WorkerEntry) -> int:
        """Slots and look-ahead that are not taken. A request with n choices takes n."""
        look_ahead = self._look_ahead[worker.info.worker_id].num_requests
        return worker.num_usable_slots() + look_ahead - worker.num_outstanding

    def _book(self, worker: WorkerEntry, request_id: str, outputs: list[RequestOutput]) -> bool:
        """Count the choices that ended. Whether the outputs are to be delivered."""
        dispatched = self._dispatched.get(request_id)
        if dispatched is None or dispatched.worker_id != worker.info.worker_id:
            return False
        dispatched.has_output = True
        num_ended = sum(output.finish_reason is not None for output in outputs)
        dispatched.num_open_choices -= num_ended
        # A request that is refused as a whole answers once, whatever its n; so does one cancelled before it forked.
        is_over = any(output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT) for output in outputs)
        if is_over or dispatched.num_open_choices <= 0:
            del self._dispatched[request_id]
            del worker.outstanding[request_id]
        else:
            worker.outstanding[request_id] = dispatched.num_open_choices
        return not dispatched.is_cancelled
