"""The engine loop's story, with a scripted transport, the sim executor, and a clock that only the steps move."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.engine_driver import make_request, sim_info
from tidegate.clock import SimClock
from tidegate.config import CacheConfig, SchedulerConfig
from tidegate.engine.engine import Engine
from tidegate.executor.base import ExecutorError, StepHandle
from tidegate.executor.sim import SimExecutor, SimHandle
from tidegate.request import FinishReason, RequestOutput, SamplingParams
from tidegate.scheduler.step import StepPlan, StepResult
from tidegate.worker.loop import EngineLoop
from tidegate.worker.messages import Cancel, FromWorker, Shutdown, StepReport, Submit, ToWorker


class ScriptedTransport:
    """`inbox` is what comes next; what is received and sent goes into `events`, in order."""

    def __init__(self, events: list[str]) -> None:
        self.inbox: list[ToWorker] = []
        self.reports: list[StepReport] = []
        self.timeouts: list[float] = []
        self._events = events

    def receive(self, timeout_s: float) -> list[ToWorker]:
        self.timeouts.append(timeout_s)
        messages, self.inbox = self.inbox, []
        self._events += ["receive"] if messages else []
        return messages

    def send(self, message: FromWorker) -> None:
        assert isinstance(message, StepReport)
        self.reports.append(message)
        self._events.append(f"send {len(message.outputs)}")


class WatchedExecutor(SimExecutor):
    """Notes launch and collect, moves the clock by each step's duration, and fails when told to."""

    def __init__(self, events: list[str], clock: SimClock) -> None:
        super().__init__(sim_info(num_blocks=64), check_kv=True)
        self.fail_at = ""
        self.during_step: Callable[[], None] = lambda: None
        self._events = events
        self._clock = clock

    def launch(self, plan: StepPlan) -> SimHandle:
        if self.fail_at == "launch":
            raise ExecutorError("no memory")
        self._events.append(f"launch {plan.step_id}")
        return super().launch(plan)

    def collect(self, handle: StepHandle) -> StepResult:
        assert isinstance(handle, SimHandle)
        self.during_step()
        self._clock.advance_to(self._clock.now() + handle.duration_s)
        self._events.append(f"collect {handle.plan.step_id}")
        result = super().collect(handle)
        if self.fail_at == "collect":
            raise ExecutorError("broken kernel")
        return result


class Stage:
    def __init__(self, max_num_seqs: int = 4) -> None:
        self.events: list[str] = []
        self.clock = SimClock(100.0)
        self.transport = ScriptedTransport(self.events)
        self.executor = WatchedExecutor(self.events, self.clock)
        scheduler = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=16)
        self.engine = Engine(self.executor.info, scheduler, CacheConfig())
        self.loop = EngineLoop(self.engine, self.executor, self.transport, self.clock, incarnation="i1")

    def submit(self, request_id: str, *, num_tokens: int = 6, max_tokens: int = 4) -> None:
        # No two prompts share a block, so that nothing is cached between them.
        first = sum(request_id.encode())
        self.transport.inbox.append(
            Submit(make_request(request_id, [first + i for i in range(num_tokens)], max_tokens))
        )

    def turns(self, num_turns: int) -> None:
        for _ in range(num_turns):
            self.loop.turn()
            self.engine.audit()

    def outputs(self, request_id: str) -> list[RequestOutput]:
        return [
            output for report in self.transport.reports for output in report.outputs if output.request_id == request_id
        ]

    def reasons(self, request_id: str) -> list[FinishReason]:
        return [output.finish_reason for output in self.outputs(request_id) if output.finish_reason is not None]

    def held_blocks(self) -> int:
        return self.engine.load(self.clock.now()).held_blocks


def test_what_a_step_brought_is_sent_while_the_next_one_runs() -> None:
    stage = Stage()
    stage.submit("a", max_tokens=2)
    stage.turns(3)
    assert stage.events == ["receive", "launch 1", "send 0", "collect 1", "launch 2", "send 1", "collect 2", "send 1"]


def test_outputs_are_sent_once_each_and_end_with_a_reason() -> None:
    stage = Stage()
    stage.submit("a", max_tokens=5)
    stage.turns(8)
    assert [len(output.token_ids) for output in stage.outputs("a")] == [1] * 5
    assert stage.reasons("a") == [FinishReason.LENGTH]
    assert not stage.engine.has_work


def test_an_idle_loop_sleeps_in_the_transport_and_reports_at_each_heartbeat() -> None:
    stage = Stage()
    stage.turns(2)
    assert stage.transport.timeouts == [1.0, 1.0]
    assert [(report.outputs, report.stats) for report in stage.transport.reports] == [([], None)] * 2


def test_a_busy_loop_never_waits_for_messages() -> None:
    stage = Stage()
    stage.submit("a", max_tokens=3)
    stage.turns(3)
    assert stage.transport.timeouts[0] == 1.0
    assert set(stage.transport.timeouts[1:]) == {0.0}


def test_a_request_that_comes_while_a_step_runs_is_in_the_next_step() -> None:
    stage = Stage()
    stage.submit("a", max_tokens=8)
    stage.turns(1)
    stage.executor.during_step = lambda: stage.submit("b") if not stage.outputs("b") else None
    stage.turns(1)
    stage.executor.during_step = lambda: None
    stage.turns(2)
    assert len(stage.outputs("b")) == 1
    assert stage.outputs("b")[0].time_s == stage.outputs("a")[2].time_s


def test_cancel_of_a_request_that_waits_for_a_slot() -> None:
    stage = Stage(max_num_seqs=1)
    stage.submit("a", max_tokens=20)
    stage.submit("b")
    stage.turns(2)
    stage.transport.inbox.append(Cancel("b"))
    stage.turns(2)
    assert stage.reasons("b") == [FinishReason.ABORT]
    assert stage.outputs("b")[0].token_ids == []


def test_cancel_in_the_middle_of_a_prefill_frees_its_blocks_before_the_next_step() -> None:
    stage = Stage()
    stage.submit("a", num_tokens=60)
    stage.turns(1)
    assert stage.held_blocks() > 0
    stage.transport.inbox.append(Cancel("a"))
    stage.turns(1)
    assert stage.held_blocks() == 0
    assert stage.reasons("a") == [FinishReason.ABORT]


def test_cancel_while_its_step_runs_takes_effect_with_that_step() -> None:
    stage = Stage()
    stage.submit("a", max_tokens=20)
    stage.submit("b", max_tokens=20)
    stage.turns(3)
    num_tokens = len(stage.outputs("a"))
    assert num_tokens == 2
    # Comes after the launch of the fourth step, whose token for "a" is therefore not delivered.
    original = stage.transport.send

    def send(message: FromWorker) -> None:
        original(message)
        if stage.transport.reports[-1].stats is not None and stage.transport.reports[-1].stats.step_id == 3:
            stage.transport.inbox.append(Cancel("a"))

    stage.transport.send = send  # type: ignore[method-assign]
    stage.turns(2)
    assert stage.reasons("a") == [FinishReason.ABORT]
    assert len([output for output in stage.outputs("a") if output.token_ids]) == 3  # of steps 1 to 3
    assert len(stage.outputs("b")) == 4


def test_cancel_of_what_has_ended_or_was_never_there_does_nothing() -> None:
    stage = Stage()
    stage.submit("a", max_tokens=1)
    stage.turns(2)
    stage.transport.inbox += [Cancel("a"), Cancel("nobody")]
    stage.turns(1)
    assert stage.reasons("a") == [FinishReason.LENGTH]
    assert stage.transport.reports[-1].outputs == []


@pytest.mark.parametrize("where", ["launch", "collect"])
def test_a_step_that_fails_ends_the_requests_of_its_plan_and_no_others(where: str) -> None:
    stage = Stage(max_num_seqs=1)
    stage.submit("a", max_tokens=20)
    stage.submit("b", max_tokens=2)
    stage.turns(2)
    stage.executor.fail_at = where
    stage.turns(1)
    stage.executor.fail_at = ""
    stage.executor._in_flight = False
    stage.turns(4)
    assert stage.reasons("a") == [FinishReason.ERROR]
    assert stage.outputs("a")[-1].error in ("no memory", "broken kernel")
    assert stage.reasons("b") == [FinishReason.LENGTH]
    assert stage.held_blocks() == 0


def test_each_step_is_reported_once_with_its_composition_and_times() -> None:
    stage = Stage()
    stage.submit("a", num_tokens=20, max_tokens=3)
    stage.turns(6)
    stats = [report.stats for report in stage.transport.reports if report.stats is not None]
    assert [(one.step_id, one.num_prefill_tokens, one.num_decode_rows) for one in stats] == [
        (1, 16, 0),
        (2, 4, 0),
        (3, 0, 1),
        (4, 0, 1),
    ]
    assert all(0.0 < one.compute_s <= one.loop_s + 1e-9 for one in stats)
    assert [one.start_s for one in stats] == sorted(one.start_s for one in stats)


def test_preemptions_and_evictions_are_counted_in_the_step_that_made_them() -> None:
    stage = Stage(max_num_seqs=2)
    # 64 blocks of 4 tokens: two answers of 200 tokens do not fit together.
    params = SamplingParams(temperature=0.0)
    for request_id in ("a", "b"):
        prompt = [ord(request_id)] * 8
        stage.transport.inbox.append(Submit(make_request(request_id, prompt, 200, params=params)))
    while stage.engine.has_work or stage.transport.inbox:
        stage.turns(1)
    stage.turns(1)
    stats = [report.stats for report in stage.transport.reports if report.stats is not None]
    assert sum(one.num_preemptions for one in stats) == stage.engine.scheduler.stats.num_preemptions > 0
    assert sum(one.num_evictions for one in stats) == stage.engine.pool.stats.num_evictions > 0


def test_every_report_carries_the_incarnation_and_the_load_of_the_step_just_launched() -> None:
    stage = Stage()
    stage.submit("a", num_tokens=10, max_tokens=2)
    stage.turns(1)
    report = stage.transport.reports[0]
    assert report.incarnation == "i1"
    assert (report.load.step_start_s, report.load.step_prefill_tokens, report.load.step_decode_rows) == (100.0, 10, 0)


def test_shutdown_ends_the_run_after_what_is_due_was_sent() -> None:
    stage = Stage()
    stage.submit("a", max_tokens=1)
    stage.executor.during_step = lambda: stage.transport.inbox.append(Shutdown())
    stage.loop.run()
    assert stage.reasons("a") == [FinishReason.LENGTH]
