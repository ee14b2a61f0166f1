"""The engine loop: intake -> schedule -> launch -> (while the step runs: emit, intake) -> collect -> apply.

    turn k    intake │ schedule │ launch ═════════ step k runs ═════════ collect │ apply │
                                   └─ emit what step k-1 brought, intake ─┘
    turn k+1                                                                               intake │ schedule │ ...

Owns: the order of things, and the clock of a worker. The same loop drives a worker process and offline use; only the
transport differs. What step k brought is sent while step k+1 runs, so the wire costs no step time.
Never does: policy, or sockets. Invariants: at most one step is in flight; a cancelled request is in no plan made after
its message was taken in; a step that fails ends the requests of its plan only.
"""

from __future__ import annotations

import gc

from tidegate.clock import Clock
from tidegate.engine.engine import Engine
from tidegate.engine.step_stats import StepStatsSource
from tidegate.executor.base import Executor, ExecutorError
from tidegate.metrics.load_snapshot import StepStats
from tidegate.request import RequestOutput
from tidegate.scheduler.step import StepPlan
from tidegate.worker.messages import Cancel, Shutdown, StepReport, Submit
from tidegate.worker.transport import Transport

HEARTBEAT_S = 1.0


class EngineLoop:
    """`incarnation` marks every report, so that those of a replaced process can be told apart."""

    def __init__(
        self,
        engine: Engine,
        executor: Executor,
        transport: Transport,
        clock: Clock,
        *,
        incarnation: str = "",
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self._engine = engine
        self._executor = executor
        self._transport = transport
        self._clock = clock
        self._incarnation = incarnation
        self._heartbeat_s = heartbeat_s
        self._is_idle = True
        self._is_stopping = False
        # What has not been sent yet: outputs, and the step they came from.
        self._outputs: list[RequestOutput] = []
        self._stats: StepStats | None = None
        self._compute_s = 0.0
        self._stats_source = StepStatsSource(engine)

    def run(self) -> None:
        """Until Shutdown comes. With nothing to compute it sleeps in the transport, and reports at each heartbeat."""
        while not self._is_stopping:
            self.turn()
        self._emit()

    def turn(self) -> None:
        """One step, or one sleep when there is nothing to compute."""
        self._intake(self._heartbeat_s if self._is_idle else 0.0)
        started_s = self._clock.now()
        plan = self._engine.schedule(started_s)
        if plan is None:
            self._is_idle = True
            self._emit()
            return
        self._is_idle = False
        outputs = self._compute(plan)  # replaces self._outputs on its way, hence the variable
        self._outputs += outputs
        self._stats = self._stats_source.of(
            plan, start_s=started_s, compute_s=self._compute_s, loop_s=self._clock.now() - started_s
        )

    def _intake(self, timeout_s: float) -> None:
        """Hand the engine the messages that are there, waiting up to `timeout_s` for the first."""
        messages = self._transport.receive(timeout_s)
        now = self._clock.now()
        for message in messages:
            match message:
                case Submit(request):
                    self._outputs += self._engine.submit(request, now)
                case Cancel(request_id):
                    self._outputs += self._engine.cancel(request_id, now)
                case Shutdown():
                    self._is_stopping = True

    def _compute(self, plan: StepPlan) -> list[RequestOutput]:
        """Launch the step; while it runs, send what the step before brought; collect it and apply what it brought."""
        self._compute_s = 0.0
        try:
            handle = self._executor.launch(plan)
        except ExecutorError as error:
            self._emit()
            return self._engine.fail_step(str(error), self._clock.now())
        self._emit()
        self._intake(0.0)
        try:
            result = self._executor.collect(handle)
        except ExecutorError as error:
            return self._engine.fail_step(str(error), self._clock.now())
        self._compute_s = result.compute_s
        return self._engine.apply(result, self._clock.now())

    def _emit(self) -> None:
        """One report: the outputs that are due, the load now, the step that ended. When idle it is the heartbeat."""
        load = self._engine.load(self._clock.now())
        self._transport.send(StepReport(self._incarnation, self._outputs, load, self._stats))
        self._outputs = []
        self._stats = None


def settle_garbage_collection() -> None:
    """Call once the model is loaded. What is there now lives as long as the process, so it need not be scanned again.

    What the engine makes from then on is freed by reference counting (its structures have no cycles), so full
    collections find nothing, and one over ten thousand waiting requests stops a step for tens of milliseconds. They
    become rare; the young generations stay, for the cycles that exceptions leave.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 50, 1_000)
