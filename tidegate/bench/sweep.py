"""`tidegate bench sweep`: how much load a server takes, and what is left of its goodput beyond that.

    capacity: the rate doubles, or halves, to where 99% of the requests just are good; then the gap is halved
    curve:    runs at multiples of the first server's capacity, the same rates for all servers

Each run is other content of the same kind, so that a server's cache does not know it. Capacity is measured, not exact:
a run cannot tell 99% from 98% unless it has some hundreds of requests, so give it time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tidegate.bench.report import plain_table, write_json
from tidegate.bench.serve import INTERRUPTED_EXIT_CODE, Bench, Measured, ServeOptions
from tidegate.bench.tables import print_details
from tidegate.bench.target import Target
from tidegate.config import ConfigError

GOOD_SHARE = 0.99
_MAX_DOUBLINGS = 8


@dataclass(frozen=True)
class SweepOptions:
    """`rates` given: these and no search. `start` is the first rate tried, `num_halvings` how fine the search ends."""

    start: float = 1.0
    rates: tuple[float, ...] = ()
    multiples: tuple[float, ...] = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
    num_halvings: int = 4


@dataclass
class Sweep:
    """One server's runs. `capacity` is None when it was not looked for, 0 when no rate that was tried held."""

    name: str
    capacity: float | None = None
    search: list[Measured] = field(default_factory=list)
    curve: list[Measured] = field(default_factory=list)


def run(options: ServeOptions, sweep_options: SweepOptions) -> int:
    """Returns the exit code. Raises ConfigError."""
    bench = Bench(options)
    sweeps: list[Sweep] = []
    rates = sweep_options.rates
    is_interrupted = False
    for target in bench.targets():
        sweep = Sweep(target.endpoint.name)
        sweeps.append(sweep)
        try:
            if not sweep_options.rates:
                _search(bench, target, sweep, sweep_options)
                rates = rates or tuple(multiple * (sweep.capacity or 0.0) for multiple in sweep_options.multiples)
            for rate in rates:
                if rate > 0.0:
                    _measure(bench, target, rate, sweep.curve)
        except KeyboardInterrupt:
            is_interrupted = True
            break
    bench.check_any(sweeps)
    _print(bench, sweeps)
    write_json(_document(bench, sweeps, is_interrupted), options.json_path)
    if options.html_path is not None:
        from tidegate.bench.html import write_report

        middle = [sweep.curve[len(sweep.curve) // 2] for sweep in sweeps if sweep.curve]
        curves = [(sweep.name, sweep.curve) for sweep in sweeps if sweep.curve]
        write_report(options.html_path, bench.title(), bench.machine, middle, curves)
    return INTERRUPTED_EXIT_CODE if is_interrupted else 0


def find_capacity(holds: Callable[[float], bool], start: float, num_halvings: int) -> float:
    """The highest rate tried that holds, 0 when none does. `holds` is asked for each rate once."""
    low, high = 0.0, start
    if holds(start):
        for _ in range(_MAX_DOUBLINGS):
            low, high = high, 2.0 * high
            if not holds(high):
                break
        else:
            return high
    else:
        for _ in range(_MAX_DOUBLINGS):
            low = high / 2.0
            if holds(low):
                break
            high = low
        else:
            return 0.0
    for _ in range(num_halvings):
        middle = (low + high) / 2.0
        if holds(middle):
            low = middle
        else:
            high = middle
    return low


def _search(bench: Bench, target: Target, sweep: Sweep, options: SweepOptions) -> None:
    def holds(rate: float) -> bool:
        measured = _measure(bench, target, rate, sweep.search)
        share = measured.figures["attainment"]
        bench.console.print(f"{sweep.name}: {rate:.3g} requests/s: {share:.1%} good")
        return bool(share >= GOOD_SHARE)

    sweep.capacity = find_capacity(holds, options.start, options.num_halvings)
    if sweep.capacity == 0.0:
        raise ConfigError(
            f"{sweep.name} keeps the objectives at no rate that was tried; start lower (--start) or ask for less"
        )
    bench.console.print(f"{sweep.name}: capacity [bold]{sweep.capacity:.3g}[/bold] requests/s")


def _measure(bench: Bench, target: Target, rate: float, runs: list[Measured]) -> Measured:
    """Raises KeyboardInterrupt after an interrupted run, which is kept."""
    measured = bench.measure(target, rate)
    runs.append(measured)
    if measured.is_interrupted:
        raise KeyboardInterrupt
    return measured


def _print(bench: Bench, sweeps: Sequence[Sweep]) -> None:
    for sweep in sweeps:
        if not sweep.curve:
            continue
        best = max(run.figures["goodput_s"] for run in sweep.curve)
        rows = [
            (
                f"{run.rate:.3g}/s" + (f" ({run.rate / sweep.capacity:.2g}x)" if sweep.capacity else ""),
                f"{run.figures['goodput_s']:.3f}",
                f"{run.figures['goodput_s'] / best:.2f}" if best else "-",
                f"{run.figures['token_goodput_s']:.1f}",
                f"{run.figures['attainment']:.1%}",
                *(str(run.figures["outcomes"].get(name, 0)) for name in ("late", "downgraded", "refused")),
                f"{run.figures['latency']['ttft_ms'].get('p99', 0.0):,.0f}",
                f"{run.figures['refusals']['time_ms'].get('p99', 0.0):,.0f}",
            )
            for run in sweep.curve
        ]
        headings = (
            "offered", "good/s", "of best", "tok/s good", "attained", "late", "downgraded", "refused", "TTFT P99",
            "refused in P99",
        )  # fmt: skip
        bench.console.print(plain_table(f"{sweep.name}: goodput over load", headings, rows))
    last = next((sweep.curve[-1] for sweep in reversed(sweeps) if sweep.curve), None)
    if last is not None:
        print_details(bench.console, f"{last.name} at {last.rate:.3g}/s", last.figures)


def _document(bench: Bench, sweeps: Sequence[Sweep], is_interrupted: bool) -> dict[str, Any]:
    document = bench.document(0.0, [])
    del document["rate"], document["servers"]
    document["is_interrupted"] = is_interrupted
    document["servers"] = {
        sweep.name: {
            "capacity": sweep.capacity,
            "best_goodput_s": max((run.figures["goodput_s"] for run in sweep.curve), default=0.0),
            "curve": [{"rate": run.rate, **run.figures} for run in sweep.curve],
            "search": [{"rate": run.rate, "attainment": run.figures["attainment"]} for run in sweep.search],
        }
        for sweep in sweeps
    }
    return document
