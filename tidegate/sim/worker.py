"""SimWorker: an engine, the executor that only knows durations, and the step that is in flight there.

Owns: the step in flight, and the ends of those that are known to follow it unchanged (`ahead`). Never: the event heap,
or the gate; the simulator decides when steps are booked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tidegate.config import Config
from tidegate.cost_model import CostModel, StepCost
from tidegate.engine.engine import Engine
from tidegate.engine.step_stats import StepStatsSource
from tidegate.executor.base import ExecutorInfo
from tidegate.executor.sim import SimExecutor, SimHandle
from tidegate.metrics.load_snapshot import StepStats
from tidegate.request import Request, RequestOutput
from tidegate.scheduler.static_batching import StaticBatching
from tidegate.scheduler.unchanged_steps import unchanged_until_s
from tidegate.worker.messages import WorkerInfo


@dataclass(frozen=True, slots=True)
class SimTimes:
    """What the machine around the executor costs: one hop between frontend and worker, and the loop around a step."""

    hop_s: float = 0.0003
    loop_s: float = 0.0005


class SimWorker:
    def __init__(
        self,
        worker_id: str,
        info: ExecutorInfo,
        cost: StepCost,
        config: Config,
        times: SimTimes,
        duration_of: Callable[[float], float] | None,
        batching: StaticBatching | None,
    ) -> None:
        self.worker_id = worker_id
        self.engine = Engine(info, config.scheduler, config.cache, CostModel(cost), batching)
        self.executor = SimExecutor(info, cost)
        self.handle: SimHandle | None = None
        self.started_s = 0.0
        self.end_event = 0
        self.ahead: list[float] = []
        """When the step in flight and its unchanged successors end; the last one's successor is not in it."""
        self.pending: list[RequestOutput] = []
        self.num_steps = 0
        self.num_steps_ahead = 0
        self.num_tokens = 0
        self.busy_s = 0.0
        self._cost = cost
        self._times = times
        self._duration_of = duration_of
        self._stats = StepStatsSource(self.engine)

    def info(self, config: Config) -> WorkerInfo:
        return WorkerInfo.of(
            self.engine.info,
            config.scheduler,
            worker_id=self.worker_id,
            incarnation="i",
            pid=0,
            # The gate sees whole turns of the loop.
            step_cost=replace(self._cost, base_s=self._cost.base_s + self._times.loop_s),
        )

    @property
    def num_rows(self) -> int:
        return 0 if self.handle is None else self.handle.plan.num_decode_rows

    def take_in(self, message: Request | str, now: float) -> list[RequestOutput]:
        """A request, or the id of one that is cancelled."""
        if isinstance(message, Request):
            return self.engine.submit(message, now)
        return self.engine.cancel(message, now)

    def start_step(self, now: float) -> bool:
        """False when there is nothing to compute."""
        plan = self.engine.schedule(now)
        if plan is None:
            return False
        self.handle = self.executor.launch(plan)
        if self._duration_of is not None:
            self.handle.duration_s = self._duration_of(self.handle.duration_s)
        self.started_s = now
        return True

    def look_ahead(self, limit: int, now: float) -> None:
        """Find the ends of the steps that will follow unchanged, at most `limit`."""
        num_steps = self.engine.num_unchanged_steps(limit)
        if num_steps < 2:
            return
        handle = self.handle
        assert handle is not None
        plan = handle.plan
        until_s = unchanged_until_s(self.engine.scheduler, now)
        num_rows, num_context = plan.num_decode_rows, plan.num_context_tokens
        step_s, loop_s = self.executor.step_s, self._times.loop_s
        end_s = now
        for _ in range(num_steps):
            end_s += step_s(0, num_rows, num_context) + loop_s
            if end_s >= until_s:
                break
            self.ahead.append(end_s)
            num_context += num_rows

    def last_end_s(self) -> float:
        """When the step in flight, and all that follow it unchanged, and the one after them will have ended."""
        handle = self.handle
        assert handle is not None
        if not self.ahead:
            plan = handle.plan
            if self._duration_of is not None:
                return self.started_s + (handle.duration_s + self._times.loop_s)
            seconds = self.executor.step_s(plan.num_prefill_tokens, plan.num_decode_rows, plan.num_context_tokens)
            return self.started_s + (seconds + self._times.loop_s)
        plan = handle.plan
        num_context = plan.num_context_tokens + len(self.ahead) * plan.num_decode_rows
        return self.ahead[-1] + (self.executor.step_s(0, plan.num_decode_rows, num_context) + self._times.loop_s)

    def book_ahead(self, num_steps: int) -> tuple[list[RequestOutput], list[StepStats]]:
        """The first `num_steps` of `ahead` have ended: what they brought together, and the stats of each."""
        handle = self.handle
        assert handle is not None
        plan = handle.plan
        ends_s, self.ahead = self.ahead[:num_steps], self.ahead[num_steps:]
        num_rows, num_context, step_id = plan.num_decode_rows, plan.num_context_tokens, plan.step_id
        start_s, loop_s = self.started_s, self._times.loop_s
        stats = []
        computes_s = []
        for end_s in ends_s:
            took_s = end_s - start_s
            computes_s.append(end_s - start_s - loop_s)
            stats.append(StepStats(step_id, start_s, computes_s[-1], took_s, 0, num_rows, num_context, 0, 0))
            self.busy_s += took_s
            step_id += 1
            num_context += num_rows
            start_s = end_s
        outputs = self.engine.apply_unchanged(self.executor.draw_ahead(plan, num_steps), ends_s, computes_s)
        self.started_s = start_s
        self.num_steps += num_steps
        self.num_steps_ahead += num_steps
        self.num_tokens += num_steps * num_rows
        return outputs, stats

    def end_step(self, now: float) -> tuple[list[RequestOutput], StepStats]:
        """The step in flight has ended: what it, and the messages since its start, brought."""
        handle, self.handle = self.handle, None
        assert handle is not None
        result = self.executor.collect(handle)
        result.compute_s = now - self.started_s - self._times.loop_s
        outputs = self.engine.apply(result, now)
        self.num_tokens += sum(len(output.token_ids) for output in outputs)
        outputs, self.pending = self.pending + outputs, []
        plan = handle.plan
        self.num_steps += 1
        self.busy_s += now - self.started_s
        stats = self._stats.of(plan, start_s=self.started_s, compute_s=result.compute_s, loop_s=now - self.started_s)
        return outputs, stats
