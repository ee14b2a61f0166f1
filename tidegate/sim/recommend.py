"""`tidegate simulate --recommend`: the fewest machines with which the work meets its objectives, and the caps to set.

    double the machines until enough requests are good ─> halve the gap to the last number that failed
    ─> with that many: the smallest max_num_seqs that still holds, and the longest queue that was seen

The search takes for granted that more machines are never worse. A smaller max_num_seqs is worth having where it holds:
it bounds the time per token whatever comes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console

from tidegate.bench.report import check_writable, console_for, plain_table, write_json
from tidegate.config import ConfigError
from tidegate.sim.simulate import Simulated, SimulateOptions, Simulation, print_head
from tidegate.sim.variants import Variant

_MAX_WORKERS = 4_096
_MIN_SEQS = 4


@dataclass(frozen=True)
class Recommendation:
    workers: int
    max_num_seqs: int
    best: Simulated
    tried: dict[str, float]


def run(options: SimulateOptions, attainment: float) -> int:
    """Returns the exit code. Raises ConfigError, also when no number of machines is enough."""
    check_writable(options.json_path)
    console = console_for(options.json_path)
    simulation = Simulation.prepare(options)
    print_head(console, simulation)
    found = recommend(simulation, attainment, console)
    figures, max_waiting = found.best.figures, found.best.max_waiting
    ttft, tpot = figures["latency"]["ttft_ms"], figures["latency"]["tpot_ms"]
    rows = [
        ("workers", f"{found.workers}"),
        ("max_num_seqs", f"{found.max_num_seqs}"),
        ("most that waited at the gate", f"{max_waiting}"),
        ("good", f"{figures['attainment']:.2%}"),
        ("TTFT P50 / P99, ms", f"{ttft.get('p50', 0):,.0f} / {ttft.get('p99', 0):,.0f}"),
        ("TPOT P50 / P99, ms", f"{tpot.get('p50', 0):,.1f} / {tpot.get('p99', 0):,.1f}"),
    ]
    console.print(plain_table(f"Fewest machines for {attainment:.1%} good", ("", ""), rows))
    write_json(_document(simulation, found, attainment), options.json_path)
    return 0


def recommend(simulation: Simulation, attainment: float, console: Console | None = None) -> Recommendation:
    """Raises ConfigError."""
    tried: dict[str, float] = {}
    results: dict[tuple[int, int], Simulated] = {}
    default_seqs = simulation.config.scheduler.max_num_seqs

    def holds(num_workers: int, max_num_seqs: int) -> bool:
        result = simulation.run(_variant(simulation, num_workers, max_num_seqs))
        result.outcomes = []
        results[num_workers, max_num_seqs] = result
        share = result.figures["attainment"]
        tried[result.variant.name] = share
        if console is not None:
            console.print(f"{result.variant.name}: {share:.2%} good")
        return bool(share >= attainment)

    workers = fewest(lambda number: holds(number, default_seqs), simulation.options.workers, _MAX_WORKERS)
    if workers is None:
        best = max(tried.values())
        raise ConfigError(
            f"no number of machines makes {attainment:.1%} of the requests good (at best {best:.2%}): "
            "some cannot meet their objectives on an idle one"
        )
    max_num_seqs = default_seqs
    while max_num_seqs // 2 >= _MIN_SEQS and holds(workers, max_num_seqs // 2):
        max_num_seqs //= 2
    return Recommendation(workers, max_num_seqs, results[workers, max_num_seqs], tried)


def fewest(holds: Callable[[int], bool], start: int, limit: int) -> int | None:
    """The smallest number that holds, if every larger one does too; None when none up to about `limit` does."""
    low, high = 0, start
    while not holds(high):
        low, high = high, 2 * high
        if high > limit:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle
    return high


def _variant(simulation: Simulation, num_workers: int, max_num_seqs: int) -> Variant:
    scheduler = simulation.config.scheduler.model_copy(update={"max_num_seqs": max_num_seqs})
    config = simulation.config.model_copy(update={"scheduler": scheduler})
    return replace(Variant(config, num_workers), name=f"workers={num_workers} max_num_seqs={max_num_seqs}")


def _document(simulation: Simulation, found: Recommendation, attainment: float) -> dict[str, Any]:
    return {
        "profile": simulation.options.profile,
        "profile_source": simulation.profile.source,
        "seed": simulation.options.seed,
        "attainment_asked": attainment,
        "workers": found.workers,
        "caps": {"max_num_seqs": found.max_num_seqs, "max_queued": found.best.max_waiting},
        "tried": found.tried,
        "best": found.best.document,
    }
