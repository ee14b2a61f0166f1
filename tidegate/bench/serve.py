"""`tidegate bench serve`: the same seeded work against one server or several, in turn, compared in one table.

Owns: the options, the order of servers, and the report. The first server that is named is what the ratios are to, and
what objectives that are multiples are multiples of.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tidegate.bench.arrivals import ClosedArrivals
from tidegate.bench.client import Endpoint
from tidegate.bench.load import LoadOptions, LoadRun
from tidegate.bench.machine import describe_machine, machine_line
from tidegate.bench.objectives import Objective, Unloaded, objectives_for
from tidegate.bench.outcome import Ending, Outcome
from tidegate.bench.presets import load_workload
from tidegate.bench.report import check_writable, console_for, percentile, write_json
from tidegate.bench.score import Objectives, score
from tidegate.bench.tables import print_comparison, print_details
from tidegate.bench.target import Target, TargetError
from tidegate.bench.trace import Trace, TraceOptions, load_trace, trace_items, trace_workload
from tidegate.bench.workload import WorkItem, Workload, generate
from tidegate.config import ConfigError
from tidegate.worker.loop import settle_garbage_collection

_BUSY_CLIENT_S = 0.02
"""P99 of its own delays above which the client was part of what was measured."""
INTERRUPTED_EXIT_CODE = 130


@dataclass(frozen=True)
class ServeOptions:
    """What `bench serve` and `bench sweep` share."""

    urls: tuple[str, ...]
    workload: str = "uniform"
    duration_s: float = 60.0
    seed: int = 0
    ttft_slo: str = "5x"
    tpot_slo: str = "3x"
    sends_slo: bool = True
    retries: bool | None = None
    timeout_s: float = 600.0
    model: str | None = None
    api_key: str | None = None
    json_path: str | None = None
    html_path: str | None = None
    trace: str | None = None
    trace_options: TraceOptions = field(default_factory=TraceOptions)


@dataclass
class Measured:
    """One run against one server, with its figures."""

    name: str
    rate: float
    figures: dict[str, Any]
    outcomes: list[Outcome] = field(default_factory=list)
    is_interrupted: bool = False


def run(options: ServeOptions, rate: float) -> int:
    """Returns the exit code. Raises ConfigError."""
    bench = Bench(options)
    rate = rate if bench.trace_rate is None else bench.trace_rate
    measured: list[Measured] = []
    for target in bench.targets():
        measured.append(bench.measure(target, rate))
        if measured[-1].is_interrupted:
            break
    bench.check_any(measured)
    for one in measured:
        print_details(bench.console, one.name, one.figures)
    print_comparison(bench.console, [(one.name, one.figures) for one in measured])
    write_json(bench.document(rate, measured), options.json_path)
    if options.html_path is not None:
        from tidegate.bench.html import write_report

        write_report(options.html_path, bench.title(rate), bench.machine, measured, [])
    return INTERRUPTED_EXIT_CODE if measured[-1].is_interrupted else 0


class Bench:
    """The state that runs against several servers share: workload, objectives, console."""

    def __init__(self, options: ServeOptions) -> None:
        """Raises ConfigError."""
        for path in (options.json_path, options.html_path):
            check_writable(path)
        self.options = options
        self.trace_rate: float | None = None
        """Mean arrivals of the trace, where there is one."""
        self._trace: Trace | None = None
        if options.trace is None:
            self.workload = load_workload(options.workload)
        else:
            self.workload = self._load_trace(options.trace)
        self.endpoints = [Endpoint.parse(url, options.api_key) for url in options.urls]
        self._ttft = Objective.parse(options.ttft_slo, "--ttft-slo")
        self._tpot = Objective.parse(options.tpot_slo, "--tpot-slo")
        self.console: Console = console_for(options.json_path)
        self.machine = describe_machine()
        self.objectives: Objectives | None = None
        self.unloaded: dict[str, Unloaded] = {}
        self.problems: list[str] = []
        self._num_runs = 0
        self.console.print(machine_line(self.machine), soft_wrap=True)

    def targets(self) -> Iterator[Target]:
        """Each server when it has been warmed up; one that cannot be measured is told and left out."""
        for place, endpoint in enumerate(self.endpoints):
            target = Target(endpoint, self.workload, f"{self.options.seed} {place}", model=self.options.model)
            try:
                with self.console.status(f"{endpoint.name}: warm-up"):
                    target.prepare()
                self._find_objectives(target)
            except TargetError as error:
                self.problems.append(str(error))
                self.console.print(f"[red]{error}[/red]", soft_wrap=True)
                continue
            yield target

    def measure(self, target: Target, rate: float) -> Measured:
        """The same work at the same times for every server, in other words for each run. Raises ConfigError."""
        options, objectives = self.options, self.objectives
        assert objectives is not None
        self._num_runs += 1
        items = self._items(rate)
        if not items:
            raise ConfigError(f"no request arrives in {options.duration_s:g} s at {rate:g} a second; see --duration")
        load_options = LoadOptions(
            retries=self.workload.retries if options.retries is None else options.retries,
            timeout_s=options.timeout_s,
            end_s=options.duration_s,
        )
        settle_garbage_collection()
        is_closed = isinstance(self.workload.arrivals, ClosedArrivals)
        name = f"{target.endpoint.name} at {rate:.3g}/s"
        with _progress(self.console, name, None if is_closed else len(items)) as on_outcome:
            load = target.run(items, load_options, objectives if options.sends_slo else None, on_outcome)
        window_s = _window_s(load, options.duration_s, is_cut=is_closed or load.is_interrupted)
        figures = score(load.outcomes, objectives, max(window_s, 1e-3), self.workload.tenant_weights)
        figures["client"] = client_figures(load)
        figures["is_interrupted"] = load.is_interrupted
        return Measured(target.endpoint.name, rate, figures, load.outcomes, load.is_interrupted)

    def _load_trace(self, path: str) -> Workload:
        """What stands for the trace; the run lasts as long as it does."""
        options = self.options
        self._trace = load_trace(path, options.trace_options)
        items = trace_items(self._trace, options.trace_options, options.seed)
        last_s = max(1e-3, items[-1].arrival_s)
        self.options = replace(options, duration_s=last_s)
        self.trace_rate = len(items) / last_s
        return trace_workload(self._trace.name, items)

    def _items(self, rate: float) -> list[WorkItem]:
        options = self.options
        if self._trace is not None:
            return trace_items(self._trace, options.trace_options, options.seed, content_seed=self._num_runs)
        return generate(self.workload, rate, options.duration_s, options.seed, content_seed=self._num_runs)

    def document(self, rate: float, measured: Sequence[Measured]) -> dict[str, Any]:
        return {
            "workload": self.workload.model_dump(mode="json", exclude={"tenants": {"__all__": {"api_key"}}}),
            "rate": rate,
            "duration_s": self.options.duration_s,
            "seed": self.options.seed,
            "unloaded": {
                name: {"ttft_ms": _ms(unloaded.ttft_s), "tpot_ms": _ms(unloaded.tpot_s)}
                for name, unloaded in self.unloaded.items()
            },
            "servers": {one.name: one.figures for one in measured},
            "bad_lines": 0 if self._trace is None else self._trace.num_bad,
            "problems": self.problems,
            "machine": self.machine,
        }

    def check_any(self, measured: Sequence[object]) -> None:
        """Raises ConfigError when there is nothing to report."""
        if not measured:
            raise ConfigError("none of the servers could be measured: " + "; ".join(self.problems))

    def title(self, rate: float | None = None) -> str:
        return f"{self.workload.name}" + ("" if rate is None else f" at {rate:g} requests/s")

    def _find_objectives(self, target: Target) -> None:
        name = target.endpoint.name
        if self._ttft.factor is not None or self._tpot.factor is not None:
            with self.console.status(f"{name}: unloaded"):
                self.unloaded[name] = target.unloaded()
        if self.objectives is None:
            self.objectives = objectives_for(self.workload, self._ttft, self._tpot, self.unloaded.get(name))
            self.console.print(f"objectives: {_describe(self.objectives)}", soft_wrap=True)


def _window_s(load: LoadRun, duration_s: float, *, is_cut: bool) -> float:
    """The time in which requests arrived: the later turns of conversations come after `duration_s`."""
    if is_cut:
        return min(duration_s, load.window_s)
    return max([duration_s, *(outcome.arrival_s for outcome in load.outcomes if outcome.item.parent is not None)])


def _describe(objectives: Objectives) -> str:
    ttfts = [f"{name} TTFT {value * 1e3:.0f} ms" for name, value in objectives.ttft_s.items()]
    return ", ".join(ttfts + [f"{name} TPOT {value * 1e3:.1f} ms" for name, value in objectives.tpot_s.items()])


def client_figures(load: LoadRun) -> dict[str, Any]:
    """How well the client kept up, in milliseconds. `is_bottleneck`: do not trust the latencies."""
    lags = sorted(outcome.send_lag_s for outcome in load.outcomes if outcome.ending is not Ending.UNSENT) or [0.0]
    delays = sorted(load.loop_delays_s) or [0.0]
    send_p99_s, loop_p99_s = percentile(lags, 0.99), percentile(delays, 0.99)
    return {
        "send_lag_ms": {
            "p50": _round_ms(percentile(lags, 0.5)),
            "p99": _round_ms(send_p99_s),
            "max": _round_ms(lags[-1]),
        },
        "loop_delay_ms": {
            "p50": _round_ms(percentile(delays, 0.5)),
            "p99": _round_ms(loop_p99_s),
            "max": _round_ms(delays[-1]),
        },
        "max_open": load.max_open,
        "is_bottleneck": max(send_p99_s, loop_p99_s) > _BUSY_CLIENT_S,
    }


def _round_ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def _ms(values: dict[str, float]) -> dict[str, float]:
    return {name: _round_ms(value) for name, value in values.items()}


@contextmanager
def _progress(console: Console, name: str, num_items: int | None) -> Iterator[Callable[[Outcome], None]]:
    """A bar of requests that ended, with what became of them. Redrawn twice a second: it shares the cores."""
    counts: Counter[str] = Counter()
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
        TextColumn("{task.fields[counts]}"), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, refresh_per_second=2, disable=not console.is_terminal) as progress:
        task = progress.add_task(name, total=num_items, counts="")

        def note(outcome: Outcome) -> None:
            counts[str(outcome.ending)] += 1
            progress.update(task, advance=1, counts=", ".join(f"{n} {kind}" for kind, n in counts.items()))

        yield note
