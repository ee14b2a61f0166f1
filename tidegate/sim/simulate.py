"""`tidegate simulate`: a workload or a trace on machines that need not exist; one report, or one row a variant.

    profile + configuration ─┐
    workload or trace ───────┴─> variants ─> Simulator ─> Outcomes ─> score (as for real servers) ─> table, JSON

Owns: the options, the variants of --compare, and what leaves. What is written depends on the inputs alone: same seed,
same bytes. How long it took goes to the terminal only.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from tidegate.bench.arrivals import ClosedArrivals
from tidegate.bench.objectives import Objective, Unloaded, objectives_for, unloaded_probe
from tidegate.bench.outcome import Outcome
from tidegate.bench.presets import load_workload
from tidegate.bench.report import check_writable, console_for, write_json
from tidegate.bench.score import Objectives, score
from tidegate.bench.tables import print_comparison, print_details
from tidegate.bench.trace import Trace, TraceOptions, load_trace, trace_items, trace_workload
from tidegate.bench.workload import WorkItem, Workload, generate
from tidegate.config import Config, ConfigError, load_config
from tidegate.sim.account import account, request_records
from tidegate.sim.clients import ClientOptions, SimClients
from tidegate.sim.profile import Profile, load_profile
from tidegate.sim.simulator import Simulator, StepRecorder
from tidegate.sim.trace_events import TraceEvents
from tidegate.sim.variants import Variant, variants_of
from tidegate.sim.worker import SimTimes
from tidegate.worker.loop import settle_garbage_collection


@dataclass(frozen=True)
class SimulateOptions:
    """`trace` given: it is served, and `workload`, `rate` and `duration_s` are not looked at."""

    workers: int = 1
    profile: str = "cpu-2core-smollm2"
    workload: str = "uniform"
    rate: float = 1.0
    duration_s: float = 60.0
    trace: str | None = None
    trace_options: TraceOptions = field(default_factory=TraceOptions)
    seed: int = 0
    ttft_slo: str = "5x"
    tpot_slo: str = "3x"
    sends_slo: bool = True
    retries: bool | None = None
    compare: tuple[str, ...] = ()
    one_at_a_time: bool = False
    config_path: Path | None = None
    json_path: str | None = None
    events_path: str | None = None


@dataclass
class Simulated:
    """One variant's run. `seconds` and what follows from it are of the real clock."""

    variant: Variant
    figures: dict[str, Any]
    outcomes: list[Outcome]
    document: dict[str, Any]
    seconds: float = 0.0
    num_steps: int = 0
    num_steps_ahead: int = 0
    num_tokens: int = 0
    max_waiting: int = 0


@dataclass
class Work:
    """What is served: the items, and the workload that stands for them."""

    workload: Workload
    items: list[WorkItem]
    window_s: float
    retries: bool
    end_s: float | None = None
    trace: Trace | None = None


@dataclass
class Simulation:
    """What all variants share."""

    options: SimulateOptions
    profile: Profile
    config: Config
    work: Work
    objectives: Objectives = field(default_factory=lambda: Objectives({}, {}))
    unloaded: Unloaded | None = None

    @classmethod
    def prepare(cls, options: SimulateOptions) -> Simulation:
        """Raises ConfigError."""
        profile = load_profile(options.profile)
        config = profile.configure(load_config(options.config_path))
        simulation = cls(options, profile, config, make_work(options))
        ttft, tpot = Objective.parse(options.ttft_slo, "--ttft-slo"), Objective.parse(options.tpot_slo, "--tpot-slo")
        if ttft.factor is not None or tpot.factor is not None:
            simulation.unloaded = simulation.measure_unloaded()
        simulation.objectives = objectives_for(simulation.work.workload, ttft, tpot, simulation.unloaded)
        return simulation

    def measure_unloaded(self) -> Unloaded:
        """As `bench serve` does with a real server: requests of each class, one after another, on one idle worker."""
        items = unloaded_probe(self.work.workload, f"{self.options.seed} probe")
        clients = SimClients([_alone(item) for item in items], ClientOptions())
        config = self.config.model_copy(update={"gate": self.config.gate.model_copy(update={"admission": "off"})})
        return Unloaded.of(clients.run(self.simulator(Variant(config, 1), clients)))

    def simulator(self, variant: Variant, clients: SimClients, recorder: StepRecorder | None = None) -> Simulator:
        profile = self.profile
        return Simulator(
            variant.config,
            profile.executor_info(),
            profile.step.cost(),
            num_workers=variant.num_workers,
            times=SimTimes(profile.loop.hop_s, profile.loop.loop_s),
            batching=variant.batching,
            on_end=clients.ended,
            recorder=recorder,
        )

    def run(self, variant: Variant, *, recorder: TraceEvents | None = None) -> Simulated:
        options, work = self.options, self.work
        clients = SimClients(
            work.items,
            ClientOptions(self.objectives if options.sends_slo else None, work.retries, work.end_s, options.seed),
            recorder.request if recorder is not None else None,
        )
        simulator = self.simulator(variant, clients, recorder)
        settle_garbage_collection()
        started_s = time.perf_counter()
        outcomes = clients.run(simulator)
        seconds = time.perf_counter() - started_s
        gc.unfreeze()
        if not outcomes:
            raise ConfigError("no request arrives; see --duration and --rate")
        figures = score(outcomes, self.objectives, self._window_s(outcomes), work.workload.tenant_weights)
        workers = simulator.workers.values()
        return Simulated(
            variant,
            figures,
            outcomes,
            {"name": variant.name, **figures, "account": account(outcomes, simulator)},
            seconds,
            num_steps=sum(worker.num_steps for worker in workers),
            num_steps_ahead=sum(worker.num_steps_ahead for worker in workers),
            num_tokens=sum(worker.num_tokens for worker in workers),
            max_waiting=simulator.max_waiting,
        )

    def _window_s(self, outcomes: Sequence[Outcome]) -> float:
        later = (outcome.arrival_s for outcome in outcomes if outcome.item.parent is not None)
        return max([self.work.window_s, *later, 1e-3])


def run(options: SimulateOptions) -> int:
    """Returns the exit code. Raises ConfigError."""
    for path in (options.json_path, options.events_path):
        check_writable(path)
    console = console_for(options.json_path)
    simulation = Simulation.prepare(options)
    base = Variant(simulation.config, options.workers)
    variants = variants_of(base, options.compare, one_at_a_time=options.one_at_a_time)
    print_head(console, simulation)
    results = []
    events = TraceEvents() if options.events_path is not None else None
    for place, variant in enumerate(variants):
        with console.status(variant.name):
            results.append(simulation.run(variant, recorder=events if place == 0 else None))
        if place:
            results[-1].outcomes = []
    _print(console, results)
    if events is not None and options.events_path is not None:
        events.write(options.events_path)
    write_json(_document(simulation, results), options.json_path)
    return 0


def make_work(options: SimulateOptions) -> Work:
    """Raises ConfigError."""
    if options.trace is None:
        workload = load_workload(options.workload)
        items = generate(workload, options.rate, options.duration_s, options.seed)
        retries = workload.retries if options.retries is None else options.retries
        end_s = options.duration_s if isinstance(workload.arrivals, ClosedArrivals) else None
        return Work(workload, items, options.duration_s, retries, end_s)
    trace = load_trace(options.trace, options.trace_options)
    items = trace_items(trace, options.trace_options, options.seed)
    window_s = max(item.arrival_s for item in items)
    return Work(trace_workload(trace.name, items), items, window_s, bool(options.retries), trace=trace)


def _alone(item: WorkItem) -> WorkItem:
    return replace(item, client=0, arrival_s=0.0, tier="", session_id="")


def print_head(console: Console, simulation: Simulation) -> None:
    options, profile, trace = simulation.options, simulation.profile, simulation.work.trace
    step = profile.step
    kv_tokens = profile.kv.block_size * profile.kv.num_blocks
    console.print(
        f"{options.workers} x {options.profile} ({profile.kind}): {profile.model}, prefill "
        f"{1 / step.prefill_token_s:,.0f} tokens/s, a step {step.base_s * 1e3:.1f} ms + "
        f"{step.decode_row_s * 1e3:.2f} ms a row, KV for {kv_tokens:,} tokens",
        soft_wrap=True,
    )
    if profile.kind == "published":
        console.print(f"[yellow]not measured by tidegate:[/yellow] {profile.source}", soft_wrap=True)
    if trace is not None:
        items = simulation.work.items
        num_prompt = sum(item.num_prompt_tokens for item in items)
        num_output = sum(item.num_output_tokens for item in items)
        console.print(
            f"{options.trace}: {len(items):,} requests, {num_prompt:,} prompt and {num_output:,} output tokens in "
            f"{simulation.work.window_s:,.0f} s" + (f"; {trace.num_bad} bad lines left out" if trace.num_bad else ""),
            soft_wrap=True,
        )
        for line in trace.bad_lines:
            console.print(f"  {line}", soft_wrap=True)
    objectives = simulation.objectives
    texts = [f"{name} TTFT {value * 1e3:,.0f} ms" for name, value in objectives.ttft_s.items()]
    texts += [f"{name} TPOT {value * 1e3:,.1f} ms" for name, value in objectives.tpot_s.items()]
    console.print("objectives: " + (", ".join(texts) or "none"), soft_wrap=True)


def _print(console: Console, results: Sequence[Simulated]) -> None:
    if len(results) == 1:
        print_details(console, results[0].variant.name, results[0].figures)
    print_comparison(console, [(one.variant.name, one.figures) for one in results])
    total = results[0].document["account"]
    console.print(
        f"accounted for: {total['requests']['sent']:,} requests, {total['output_tokens']['computed']:,} output tokens; "
        f"adds up: {'yes' if total['adds_up'] else 'NO'}"
    )
    seconds = sum(one.seconds for one in results)
    num_requests = sum(one.figures["sent"] for one in results)
    num_steps = sum(one.num_steps for one in results)
    num_ahead = sum(one.num_steps_ahead for one in results)
    num_tokens = sum(one.num_tokens for one in results)
    console.print(
        f"simulated in {seconds:.1f} s: {num_requests / max(seconds, 1e-9):,.0f} requests/s, "
        f"{num_tokens / max(seconds, 1e-9):,.0f} tokens/s; {num_steps:,} steps, of which "
        f"{num_ahead / max(1, num_steps):.0%} repeated the one before and were booked together",
        soft_wrap=True,
    )


def _document(simulation: Simulation, results: Sequence[Simulated]) -> dict[str, Any]:
    options, work = simulation.options, simulation.work
    document: dict[str, Any] = {
        "profile": options.profile,
        "profile_kind": simulation.profile.kind,
        "profile_source": simulation.profile.source,
        "workers": options.workers,
        "seed": options.seed,
        "workload": work.workload.name,
        "requests": len(work.items),
        "variants": [one.document for one in results],
    }
    if work.trace is None:
        document |= {"rate": options.rate, "duration_s": options.duration_s}
    else:
        document |= {"trace": work.trace.name, "bad_lines": work.trace.num_bad}
    if len(results) == 1:
        document["served"] = request_records(results[0].outcomes, simulation.objectives)
    return document
