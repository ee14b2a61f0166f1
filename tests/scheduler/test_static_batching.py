"""Static batching as a comparison must have it: together in, together out, and padding paid for."""

from __future__ import annotations

from tests.engine_driver import make_request, sim_info
from tidegate.config import Config, GateConfig, SchedulerConfig
from tidegate.cost_model import StepCost
from tidegate.engine.engine import Engine
from tidegate.scheduler.static_batching import StaticBatching, StaticScheduler
from tidegate.scheduler.step import StepPlan, StepResult
from tidegate.sim.simulator import SimArrival, SimOutcome, Simulator


def _engine(num_blocks: int = 400, **changes) -> Engine:
    batching = StaticBatching(**({"batch_size": 3, "max_wait_s": 1.0} | changes))
    return Engine(sim_info(num_blocks), SchedulerConfig(max_num_seqs=3), Config().cache, batching=batching)


def _step(engine: Engine, now: float) -> StepPlan | None:
    plan = engine.schedule(now)
    if plan is not None:
        engine.apply(StepResult([7] * sum(len(row.samples) for row in plan.rows), 0.01), now + 0.01)
        engine.audit()
    return plan


def _submit(engine: Engine, name: str, length: int, max_tokens: int, now: float = 0.0) -> None:
    engine.submit(make_request(name, [ord(name)] * length, max_tokens), now)


def test_a_batch_starts_when_it_is_full_or_its_first_request_has_waited_long_enough():
    engine = _engine()
    _submit(engine, "a", 4, 2)
    _submit(engine, "b", 4, 2, now=0.5)
    assert _step(engine, 0.9) is None
    assert engine.scheduler.deadline_s == 1.0
    assert len(_step(engine, 1.0).rows) == 2
    full = _engine()
    for name in "abc":
        _submit(full, name, 4, 2)
    assert len(_step(full, 0.0).rows) == 3


def test_prompts_are_paid_for_at_the_length_of_the_longest():
    engine = _engine()
    for name, length in (("a", 4), ("b", 10), ("c", 30)):
        _submit(engine, name, length, 2)
    plan = _step(engine, 0.0)
    assert plan.num_prefill_tokens == 3 * 30
    assert engine.scheduler.num_padding_prefill_tokens == 90 - 44


def test_a_row_that_has_ended_is_paid_for_until_the_longest_ends():
    engine = _engine()
    for name, max_tokens in (("a", 2), ("b", 3), ("c", 6)):
        _submit(engine, name, 4, max_tokens)
    _step(engine, 0.0)
    plans = [_step(engine, 0.1 * i) for i in range(1, 6)]
    assert [plan.num_decode_rows for plan in plans] == [3] * 5
    assert [len(plan.rows) for plan in plans] == [3, 2, 1, 1, 1]
    assert [plan.num_context_tokens for plan in plans] == [3 * length for length in (5, 6, 7, 8, 9)]
    assert isinstance(engine.scheduler, StaticScheduler)
    assert engine.scheduler.num_padding_decode_rows == 7
    assert _step(engine, 1.0) is None


def test_nobody_joins_before_the_whole_batch_has_left():
    engine = _engine()
    for name, max_tokens in (("a", 2), ("b", 2), ("c", 5)):
        _submit(engine, name, 4, max_tokens)
    _step(engine, 0.0)
    for name in "def":
        _submit(engine, name, 4, 2, now=0.05)
    for i in range(4):
        assert _step(engine, 0.1 * (i + 1)).num_prefill_tokens == 0
    assert len(_step(engine, 0.6).rows) == 3


def test_a_batch_has_room_for_its_longest_answers_so_nothing_is_preempted():
    engine = _engine(num_blocks=20)
    for name in "abc":
        _submit(engine, name, 8, 25)  # eight blocks each
    assert len(_step(engine, 0.0).rows) == 2
    now = 0.0
    while engine.has_work:
        now += 2.0
        _step(engine, now)
    assert engine.scheduler.stats.num_preemptions == 0


def test_a_cancelled_request_leaves_its_batch_running():
    engine = _engine()
    for name in "abc":
        _submit(engine, name, 4, 3)
    _step(engine, 0.0)
    engine.cancel("b", 0.05)
    plan = _step(engine, 0.1)
    assert (len(plan.rows), plan.num_decode_rows) == (2, 3)


def _simulated(batching: StaticBatching | None) -> list[SimOutcome]:
    arrivals = [SimArrival(make_request(f"r{i}", [i + 1] * 20, 4 + 12 * (i % 4)), None) for i in range(40)]
    for i, arrival in enumerate(arrivals):
        arrival.request.arrival_s = 0.02 * i
    config = Config(scheduler=SchedulerConfig(max_num_seqs=8), gate=GateConfig(admission="off"))
    simulator = Simulator(config, sim_info(400), StepCost(), batching=batching)
    outcomes = simulator.run(arrivals)
    scheduler = simulator.workers["w0"].engine.scheduler
    if isinstance(scheduler, StaticScheduler):  # the gate fills the batches: only the first and last may be smaller
        assert scheduler.num_batches <= 7
    return outcomes


def test_the_simulator_serves_everyone_later_than_with_continuous_batching():
    static = _simulated(StaticBatching(batch_size=8, max_wait_s=0.2))
    continuous = _simulated(None)
    for outcomes in (static, continuous):
        assert [o.num_output_tokens for o in outcomes] == [4 + 12 * (i % 4) for i in range(40)]
    assert max(o.ended_s for o in static) > 1.2 * max(o.ended_s for o in continuous)
    assert sum(o.ttft_s for o in static) > 2 * sum(o.ttft_s for o in continuous)


def test_a_lone_request_is_served_after_the_longest_wait():
    (outcome,) = Simulator(
        Config(gate=GateConfig(admission="off")),
        sim_info(),
        StepCost(),
        batching=StaticBatching(batch_size=8, max_wait_s=0.2),
    ).run([SimArrival(make_request("r", [1] * 4, 2))])
    assert outcome.num_output_tokens == 2
    assert outcome.ttft_s >= 0.2
