"""`tidegate bench admission-sim`: what the gate is worth, in simulated time: exact, and the same on any machine.

The mixes `uniform` and `heavy` on a machine of the simulator's profile, open loop, objectives 5x unloaded TTFT and 3x
unloaded TPOT by class. For each mix: the capacity (highest rate with 99% good), goodput from half to four times of it
with admission on and off and under the best static cap; how well first tokens were predicted; what refused requests
would have got with the gate off; priority under a flood of flex; clients that retry.

Owns: the runs and their figures. Never: a clock, or a policy: all that decides is the gate's and the engine's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Console

from tidegate.bench.arrivals import StepArrivals
from tidegate.bench.objectives import Objective, objectives_for
from tidegate.bench.outcome import Ending, Outcome
from tidegate.bench.presets import load_workload
from tidegate.bench.report import check_writable, console_for, percentile, plain_table, write_json
from tidegate.bench.score import Verdict, score, verdict
from tidegate.bench.sweep import find_capacity
from tidegate.bench.workload import TenantSpec, WorkItem, Workload, generate
from tidegate.config import Config
from tidegate.sim.clients import ClientOptions, SimClients
from tidegate.sim.profile import load_profile
from tidegate.sim.simulate import SimulateOptions, Simulation, Work
from tidegate.sim.simulator import SimOutcome
from tidegate.sim.variants import Variant

MIXES = ("uniform", "heavy")
MULTIPLES = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
CAPPED_AT = (2.0, 4.0)
RUNNING_CAPS = (4, 8, 16)
QUEUE_CAPS = (0, 2, 4, 8, 16, 64)
_GOOD_SHARE = 0.99
_LOAD_STEP = StepArrivals(scales=(0.6, 2.0, 0.6))
_RETRYING_S = 60.0  # as the requirement has it; less where all runs are shorter


@dataclass(frozen=True)
class AdmissionOptions:
    profile: str = "cpu-2core-smollm2"
    mixes: tuple[str, ...] = MIXES
    duration_s: float = 300.0
    seed: int = 0
    json_path: str | None = None


@dataclass
class SimRun:
    """`num_queued`: requests that had to wait at the gate. `step_s`: the mean step."""

    outcomes: list[Outcome]
    figures: dict[str, Any]
    num_queued: int
    step_s: float

    @property
    def goodput(self) -> float:
        return float(self.figures["goodput_s"])

    @property
    def num_late_refusals(self) -> int:
        return sum(1 for outcome in self.outcomes if (outcome.time_to_refuse_s or 0.0) > 0.0)

    def tier(self, name: str) -> dict[str, Any]:
        return dict(self.figures["by_tier"][name])


@dataclass
class Machine:
    """One simulated machine and the objectives of one mix on it."""

    options: AdmissionOptions
    workload: Workload
    simulation: Simulation = field(init=False)

    def __post_init__(self) -> None:
        options = self.options
        profile = load_profile(options.profile)
        work = Work(self.workload, [], options.duration_s, retries=False)
        sim_options = SimulateOptions(profile=options.profile, duration_s=options.duration_s, seed=options.seed)
        self.simulation = Simulation(sim_options, profile, profile.configure(Config()), work)
        self.simulation.unloaded = self.simulation.measure_unloaded()
        self.simulation.objectives = objectives_for(
            self.workload, Objective(factor=5.0), Objective(factor=3.0), self.simulation.unloaded
        )

    def items(self, rate: float, workload: Workload | None = None, duration_s: float | None = None) -> list[WorkItem]:
        return generate(
            workload or self.workload, rate, duration_s or self.options.duration_s, f"{self.options.seed} {rate:.6f}"
        )

    def run(
        self,
        items: Sequence[WorkItem],
        *,
        retries: bool = False,
        sends_slo: bool = True,
        gate: dict[str, Any] | None = None,
        scheduler: dict[str, Any] | None = None,
    ) -> SimRun:
        base = self.simulation.config
        config = base.model_copy(
            update={
                "gate": base.gate.model_copy(update=gate or {}),
                "scheduler": base.scheduler.model_copy(update=scheduler or {}),
            }
        )
        objectives = self.simulation.objectives
        queued: set[str] = set()

        def note(outcome: Outcome, result: SimOutcome | None) -> None:
            if result is not None and result.served is not None and result.dispatched_s != result.request.arrival_s:
                queued.add(result.request.request_id)

        clients = SimClients(
            items, ClientOptions(objectives if sends_slo else None, retries, seed=self.options.seed), note
        )
        simulator = self.simulation.simulator(Variant(config, 1), clients)
        outcomes = clients.run(simulator)
        window_s = max(item.arrival_s for item in items)
        workers = simulator.workers.values()
        num_steps = sum(worker.num_steps for worker in workers)
        return SimRun(
            outcomes,
            score(outcomes, objectives, window_s),
            len(queued),
            sum(worker.busy_s for worker in workers) / max(1, num_steps),
        )

    def capacity(self, say: Callable[[str], None]) -> float:
        def holds(rate: float) -> bool:
            duration_s = self.options.duration_s * max(1.0, 1.0 / rate)  # as many requests as seconds, at least
            share = self.run(self.items(rate, duration_s=duration_s)).figures["attainment"]
            say(f"{self.workload.name}: {rate:.3g} requests/s: {share:.1%} good")
            return bool(share >= _GOOD_SHARE)

        return find_capacity(holds, 1.0, 5)


OFF = {"admission": "off"}


def run(options: AdmissionOptions) -> int:
    """Returns the exit code. Raises ConfigError."""
    check_writable(options.json_path)
    console = console_for(options.json_path)
    console.print(
        f"simulated on the profile {options.profile}: {options.duration_s:g} s of arrivals a run, seed {options.seed}"
    )
    progress = Console(stderr=True, highlight=False)
    document: dict[str, Any] = {"profile": options.profile, "duration_s": options.duration_s, "seed": options.seed}
    for name in options.mixes:
        document[name] = measure_mix(options, name, lambda text: progress.print(text, soft_wrap=True))
        print_mix(console, name, document[name])
    write_json(document, options.json_path)
    return 0


def measure_mix(options: AdmissionOptions, name: str, say: Callable[[str], None]) -> dict[str, Any]:
    machine = Machine(options, load_workload(name))
    capacity = machine.capacity(say)
    if capacity == 0.0:
        capacity = 1.0
    curve = []
    runs: dict[float, SimRun] = {}
    for multiple in MULTIPLES:
        items = machine.items(multiple * capacity)
        on, off = machine.run(items), machine.run(items, gate=OFF)
        runs[multiple] = on
        curve.append(_point(machine, multiple, on, off))
        say(f"{name}: {multiple:g}x: {on.goodput:.3f} good/s, {off.goodput:.3f} with admission off")
    best = max(point["goodput_s"] for point in curve)
    return {
        "capacity": capacity,
        "objectives": runs[1.0].figures["objectives"],
        "curve": curve,
        "of_best": {f"{m:g}": round(runs[m].goodput / best, 4) for m in CAPPED_AT},
        "static_caps": _static_caps(machine, capacity, runs, say),
        "long_class": _long_class(runs),
        "prediction": _predictions(machine, capacity),
        "refusals": _refusals(machine, capacity),
        "priority": _priority(machine, capacity),
        "retries": _retries(machine, capacity),
    }


def _point(machine: Machine, multiple: float, on: SimRun, off: SimRun) -> dict[str, Any]:
    figures = on.figures
    return {
        "multiple": multiple,
        "goodput_s": on.goodput,
        "token_goodput_s": figures["token_goodput_s"],
        "attainment": figures["attainment"],
        "outcomes": figures["outcomes"],
        "codes": {code: one["count"] for code, one in figures["refusals"]["by_code"].items()},
        "num_queued": on.num_queued,
        "num_late_refusals": on.num_late_refusals,
        "off_goodput_s": off.goodput,
        "prediction": figures["prediction"],
        "by_class": {
            cls: {name: one[name] for name in ("sent", "goodput_s", "token_goodput_s", "attainment")}
            for cls, one in figures["by_class"].items()
        },
    }


def _static_caps(
    machine: Machine, capacity: float, runs: dict[float, SimRun], say: Callable[[str], None]
) -> dict[str, Any]:
    """The best of all caps at each rate, though a real one would have to be the same at all of them."""
    result: dict[str, Any] = {}
    for multiple in CAPPED_AT:
        items = machine.items(multiple * capacity)
        found = {
            (running, queue): machine.run(
                items, gate={**OFF, "max_queued": queue}, scheduler={"max_num_seqs": running}
            ).goodput
            for running in RUNNING_CAPS
            for queue in QUEUE_CAPS
        }
        running, queue = max(found, key=lambda caps: found[caps])
        best = found[running, queue]
        result[f"{multiple:g}"] = {
            "max_num_seqs": running,
            "max_queued": queue,
            "goodput_s": best,
            "ratio": round(runs[multiple].goodput / best, 4) if best else None,
        }
        say(f"{machine.workload.name}: {multiple:g}x: best cap {running} running, {queue} queued: {best:.3f} good/s")
    return result


def _long_class(runs: dict[float, SimRun]) -> dict[str, Any]:
    """Of the output tokens of good answers, the long class's share, over its share of those that were asked for."""
    result: dict[str, Any] = {}
    for multiple in CAPPED_AT:
        run = runs[multiple]
        if "long" not in run.figures["by_class"]:
            return {}
        wanted = [outcome.item for outcome in run.outcomes]
        fair = sum(i.num_output_tokens for i in wanted if i.length_class == "long") / sum(
            i.num_output_tokens for i in wanted
        )
        got = run.figures["by_class"]["long"]["token_goodput_s"] / max(run.figures["token_goodput_s"], 1e-9)
        result[f"{multiple:g}"] = {"fair_share": round(fair, 4), "share": round(got, 4), "ratio": round(got / fair, 3)}
    return result


def _predictions(machine: Machine, capacity: float) -> dict[str, Any]:
    steps = machine.workload.model_copy(update={"arrivals": _LOAD_STEP})
    runs = {
        "0.9x": machine.run(machine.items(0.9 * capacity)),
        "2x": machine.run(machine.items(2.0 * capacity)),
        "load step": machine.run(machine.items(capacity, steps)),
    }
    return {name: run.figures["prediction"] for name, run in runs.items()}


def _refusals(machine: Machine, capacity: float) -> dict[str, Any]:
    """What those that were refused get with the gate off, with the same arrivals; and how many waited first."""
    result: dict[str, Any] = {}
    for multiple in (1.0, 2.0, 4.0):
        items = machine.items(multiple * capacity)
        on, off = machine.run(items), machine.run(items, gate=OFF)
        refused = [outcome.item.index for outcome in on.outcomes if outcome.ending is Ending.REFUSED]
        objectives = machine.simulation.objectives
        good = {o.item.index for o in off.outcomes if verdict(o, objectives) is Verdict.GOOD}
        num_good = sum(index in good for index in refused)
        result[f"{multiple:g}"] = {
            "refused": len(refused),
            "would_be_good": num_good,
            "would_be_good_share": round(num_good / max(1, len(refused)), 4),
            "queued": on.num_queued,
            "late": on.num_late_refusals,
            "late_share": round(on.num_late_refusals / max(1, on.num_queued), 4),
        }
    return result


def _priority(machine: Machine, capacity: float) -> dict[str, Any]:
    """`priority` at 0.3x alone, and under `flex` at 3x; each with its tier's own objectives."""

    def tiered(tier: str, rate: float) -> list[WorkItem]:
        return machine.items(rate, machine.workload.model_copy(update={"tenants": (TenantSpec(name="", tier=tier),)}))

    urgent, flood = tiered("priority", 0.3 * capacity), tiered("flex", 3.0 * capacity)
    both = sorted((*urgent, *flood), key=lambda item: item.arrival_s)
    together = machine.run([replace(item, index=i) for i, item in enumerate(both)], sends_slo=False)
    alone, flood_alone = machine.run(urgent, sends_slo=False), machine.run(flood, sends_slo=False)
    ttft_s = {name: _ttft_p99(run, "priority") for name, run in (("alone", alone), ("flooded", together))}
    tokens_s = {name: _tokens_per_s(run) for name, run in (("flood_alone", flood_alone), ("together", together))}
    return {
        "ttft_p99_alone_s": round(ttft_s["alone"], 4),
        "ttft_p99_flooded_s": round(ttft_s["flooded"], 4),
        "step_s": round(together.step_s, 4),
        "ttft_ratio": round((ttft_s["flooded"] - together.step_s) / ttft_s["alone"], 3),
        "tokens_s_flood_alone": round(tokens_s["flood_alone"], 2),
        "tokens_s_together": round(tokens_s["together"], 2),
        "tokens_ratio": round(tokens_s["together"] / tokens_s["flood_alone"], 3),
        "priority_refused": together.tier("priority")["outcomes"].get("refused", 0),
    }


def _ttft_p99(run: SimRun, tier: str) -> float:
    return percentile(sorted(o.ttft_s for o in run.outcomes if o.item.tier == tier and o.ttft_s is not None), 0.99)


def _tokens_per_s(run: SimRun) -> float:
    """Output tokens that came while requests arrived."""
    window_s = max(outcome.arrival_s for outcome in run.outcomes)
    return sum(sum(time_s <= window_s for time_s in outcome.token_times) for outcome in run.outcomes) / window_s


def _retries(machine: Machine, capacity: float) -> dict[str, Any]:
    """3x for a minute, with and without retries; latencies of a request that was sent again count from its last
    attempt, and from the first one in `goodput_from_first_s`."""
    duration_s = min(_RETRYING_S, machine.options.duration_s)
    items = machine.items(3.0 * capacity, duration_s=duration_s)
    without, retrying = machine.run(items), machine.run(items, retries=True)
    objectives = machine.simulation.objectives
    attempts = [
        replace(outcome, arrival_s=outcome.last_attempt_s if outcome.last_attempt_s is not None else outcome.arrival_s)
        for outcome in retrying.outcomes
    ]
    # Those whose last attempt came later add to what is served, but not within the minute.
    in_time = [o for o in attempts if o.arrival_s <= duration_s]
    num_good = sum(verdict(outcome, objectives) is Verdict.GOOD for outcome in in_time)
    goodput = num_good / max(item.arrival_s for item in items)
    return {
        "goodput_without_s": without.goodput,
        "goodput_s": round(goodput, 4),
        "ratio": round(goodput / max(without.goodput, 1e-9), 3),
        "goodput_from_first_s": retrying.goodput,
        "attempts": retrying.figures["attempts"],
        "requests": len(items),
    }


def print_mix(console: Console, name: str, mix: dict[str, Any]) -> None:
    best = max(point["goodput_s"] for point in mix["curve"])
    rows = [
        (
            f"{point['multiple']:g}x",
            f"{point['goodput_s']:.3f}",
            f"{point['goodput_s'] / best:.2f}" if best else "-",
            f"{point['off_goodput_s']:.3f}",
            f"{point['token_goodput_s']:.1f}",
            *(str(point["outcomes"].get(kind, 0)) for kind in ("good", "late", "downgraded", "refused")),
            " ".join(f"{one['attainment']:.1%}" for one in point["by_class"].values()),
        )
        for point in mix["curve"]
    ]
    headings = (
        "load", "good/s", "of best", "gate off", "tok/s good", "good", "late", "downgraded", "refused",
        "attained: " + ", ".join(mix["curve"][0]["by_class"]),
    )  # fmt: skip
    console.print(plain_table(f"{name}: capacity {mix['capacity']:.3g} requests/s (simulated)", headings, rows))
    console.print(plain_table(f"{name}: figures", ("", "", "target"), _figure_rows(mix)))


def _figure_rows(mix: dict[str, Any]) -> list[tuple[str, str, str]]:
    rows = [(f"goodput at {at}x, of best", f"{share:.2f}", ">= 0.95") for at, share in mix["of_best"].items()]
    for at, cap in mix["static_caps"].items():
        caps = f"{cap['max_num_seqs']} running, {cap['max_queued']} queued"
        ratio = "-" if cap["ratio"] is None else f"{cap['ratio']:.2f}"
        rows.append((f"goodput at {at}x over the best static cap ({caps})", ratio, ">= 1.3 on heavy"))
    for at, one in mix["long_class"].items():
        text = f"{one['ratio']:.2f} ({one['share']:.1%} of {one['fair_share']:.1%})"
        rows.append((f"long class's part of its token share at {at}x", text, ">= 0.5"))
    for at, one in mix["prediction"].items():
        if one:
            rows.append((f"TTFT error at {at}, median / P90", f"{one['p50']:.1%} / {one['p90']:.1%}", "15% / 40%"))
    for at, one in mix["refusals"].items():
        text = f"{one['would_be_good_share']:.1%} of {one['refused']}"
        rows.append((f"refused at {at}x, good with the gate off", text, "<= 10%"))
        rows.append((f"late refusals at {at}x", f"{one['late_share']:.1%} of {one['queued']} queued", "<= 2%"))
    priority = mix["priority"]
    ttfts = f"{priority['ttft_p99_alone_s']:.2f} s, {priority['ttft_p99_flooded_s']:.2f} s"
    text = f"{priority['ttft_ratio']:.2f} ({ttfts})"
    rows.append(("priority under a flex flood: P99 TTFT less one step, over alone", text, "<= 1.5"))
    rows.append(("total tok/s over the flood alone", f"{priority['tokens_ratio']:.2f}", ">= 0.9"))
    retries = mix["retries"]
    text = f"{retries['ratio']:.2f} ({retries['attempts']} attempts of {retries['requests']})"
    rows.append(("goodput with retries over without, at 3x", text, ">= 0.9"))
    return rows
