"""Objectives as they are asked for on the command line: absolute (2s, 150ms) or as a multiple of unloaded (5x).

Multiples are taken of the medians, by length class, of a few requests sent one after another to an idle server.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from tidegate.bench.outcome import Outcome
from tidegate.bench.score import Objectives
from tidegate.bench.workload import WorkItem, Workload, unloaded_items
from tidegate.config import ConfigError, parse_duration

NUM_UNLOADED_PER_CLASS = 5
_MAX_UNLOADED_TOKENS = 48  # time per token hardly depends on how many there are


@dataclass(frozen=True)
class Objective:
    """`factor` of unloaded, or `seconds`; exactly one is set."""

    seconds: float | None = None
    factor: float | None = None

    @classmethod
    def parse(cls, text: str, option: str) -> Objective:
        """Raises ConfigError."""
        try:
            value = cls(factor=float(text[:-1])) if text.endswith("x") else cls(seconds=_seconds(text))
        except ValueError:
            raise ConfigError(f"{option} takes a time like 2s or 150ms, or a multiple like 5x, not {text!r}") from None
        if not (value.factor or value.seconds or 0.0) > 0.0:
            raise ConfigError(f"{option} must be above 0")
        return value

    def of(self, unloaded_s: float | None) -> float | None:
        """Seconds; None where nothing is known to be a multiple of."""
        if self.seconds is not None:
            return self.seconds
        return None if unloaded_s is None or self.factor is None else self.factor * unloaded_s


def _seconds(text: str) -> float:
    value = parse_duration(text)
    assert isinstance(value, float)
    return value


@dataclass(frozen=True)
class Unloaded:
    """Medians in seconds, by length class."""

    ttft_s: dict[str, float]
    tpot_s: dict[str, float]

    @classmethod
    def of(cls, outcomes: Sequence[Outcome]) -> Unloaded:
        ttfts: dict[str, list[float]] = defaultdict(list)
        tpots: dict[str, list[float]] = defaultdict(list)
        for outcome in outcomes:
            if outcome.ttft_s is not None:
                ttfts[outcome.item.length_class].append(outcome.ttft_s)
            if outcome.tpot_s is not None:
                tpots[outcome.item.length_class].append(outcome.tpot_s)
        return cls({name: median(v) for name, v in ttfts.items()}, {name: median(v) for name, v in tpots.items()})


def objectives_for(workload: Workload, ttft: Objective, tpot: Objective, unloaded: Unloaded | None) -> Objectives:
    classes = [one.name for one in workload.classes]
    ttfts = {name: ttft.of(unloaded.ttft_s.get(name) if unloaded else None) for name in classes}
    tpots = {name: tpot.of(unloaded.tpot_s.get(name) if unloaded else None) for name in classes}
    return Objectives(
        {name: value for name, value in ttfts.items() if value is not None},
        {name: value for name, value in tpots.items() if value is not None},
    )


def unloaded_probe(workload: Workload, seed: str) -> list[WorkItem]:
    """Items for one client to send one after another, their answers cut to what is needed."""
    items = []
    for item in unloaded_items(workload, seed, NUM_UNLOADED_PER_CLASS):
        num_tokens = min(item.num_output_tokens, _MAX_UNLOADED_TOKENS)
        items.append(replace(item, num_output_tokens=num_tokens, max_tokens=num_tokens))
    return items
