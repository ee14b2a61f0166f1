"""From outcomes to figures: latency, throughput, goodput, fairness. Pure; the same for real servers and the simulator.

A request is good when it got the whole answer it wanted, in the tier it asked for, with TTFT and TPOT within its
objective; everything else has a name of its own (Verdict) and counts nothing. Goodput is good requests per second,
token goodput the output tokens of good requests per second, both over the time in which requests arrived.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from statistics import fmean
from typing import Any

from tidegate.bench.fairness import jain_index, max_service_gap, service_by_tenant
from tidegate.bench.outcome import Ending, Outcome
from tidegate.bench.report import percentile

PERCENTILES = (("p50", 0.5), ("p90", 0.9), ("p95", 0.95), ("p99", 0.99))


class Verdict(StrEnum):
    GOOD = "good"
    LATE = "late"  # the whole answer, but TTFT or TPOT above the objective
    DOWNGRADED = "downgraded"  # in another tier, or cut shorter, and told so
    SHORT = "short"
    REFUSED = "refused"
    UNAVAILABLE = "unavailable"
    INVALID = "invalid"
    FAILED = "failed"
    UNSENT = "unsent"


@dataclass(frozen=True)
class Objectives:
    """Seconds, by length class. A class that is not there has no objective."""

    ttft_s: Mapping[str, float]
    tpot_s: Mapping[str, float]

    def are_met(self, outcome: Outcome) -> bool:
        length_class = outcome.item.length_class
        ttft_s, tpot_s = outcome.ttft_s, outcome.tpot_s
        if ttft_s is None or ttft_s > self.ttft_s.get(length_class, float("inf")):
            return False
        return tpot_s is None or tpot_s <= self.tpot_s.get(length_class, float("inf"))


def verdict(outcome: Outcome, objectives: Objectives) -> Verdict:
    if outcome.ending in (Ending.COMPLETE, Ending.SHORT):
        if outcome.is_downgraded:
            return Verdict.DOWNGRADED
        if outcome.ending is Ending.SHORT:
            return Verdict.SHORT
        return Verdict.GOOD if objectives.are_met(outcome) else Verdict.LATE
    return Verdict(str(outcome.ending))


def score(
    outcomes: Sequence[Outcome], objectives: Objectives, window_s: float, weights: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """`window_s` is the time in which requests arrived. `weights`: each tenant's share of the machine."""
    judged = [(outcome, verdict(outcome, objectives)) for outcome in outcomes]
    sent = [pair for pair in judged if pair[1] is not Verdict.UNSENT]
    span_s = max((outcome.ended_s for outcome, _ in sent), default=window_s)
    return {
        **_group(judged, window_s),
        "window_s": round(window_s, 3),
        "span_s": round(span_s, 3),
        "latency": latency([outcome for outcome, _ in sent]),
        "throughput": _throughput([outcome for outcome, _ in sent], span_s),
        "refusals": _refusals(judged),
        "prefix": _prefix([outcome for outcome, _ in sent]),
        "fairness": _fairness([outcome for outcome, _ in sent], weights or {}),
        "prediction": _prediction([outcome for outcome, _ in sent]),
        "by_class": _groups(judged, window_s, lambda outcome: outcome.item.length_class),
        "by_tier": _groups(judged, window_s, lambda outcome: outcome.item.tier or "default"),
        "by_tenant": _groups(judged, window_s, lambda outcome: outcome.item.tenant or "-"),
        "objectives": {
            "ttft_ms": {name: round(value * 1e3, 2) for name, value in objectives.ttft_s.items()},
            "tpot_ms": {name: round(value * 1e3, 3) for name, value in objectives.tpot_s.items()},
        },
    }


def latency(outcomes: Sequence[Outcome]) -> dict[str, dict[str, float]]:
    """Milliseconds, of everything that brought a token."""
    answered = [outcome for outcome in outcomes if outcome.token_times]
    gaps: list[float] = []
    for outcome in answered:
        if outcome.is_thinned:
            continue
        times = outcome.token_times
        gaps += [later - earlier for earlier, later in pairwise(times)]
    return {
        "ttft_ms": summary_ms(outcome.ttft_s for outcome in answered),
        "tpot_ms": summary_ms(outcome.tpot_s for outcome in answered),
        "itl_ms": summary_ms(gaps),
        "e2e_ms": summary_ms(outcome.e2e_s for outcome in answered),
    }


def summary_ms(seconds: Iterable[float | None]) -> dict[str, float]:
    """Mean, percentiles and maximum; empty when there is nothing."""
    ordered = sorted(value * 1e3 for value in seconds if value is not None)
    if not ordered:
        return {}
    figures = {"mean": fmean(ordered), **{name: percentile(ordered, share) for name, share in PERCENTILES}}
    return {name: round(value, 3) for name, value in (figures | {"max": ordered[-1]}).items()}


def _groups(
    judged: Sequence[tuple[Outcome, Verdict]], window_s: float, name_of: Callable[[Outcome], str]
) -> dict[str, dict[str, Any]]:
    groups: dict[str, list[tuple[Outcome, Verdict]]] = defaultdict(list)
    for pair in judged:
        groups[name_of(pair[0])].append(pair)
    figures = {}
    for name, pairs in sorted(groups.items()):
        outcomes = [outcome for outcome, _ in pairs]
        all_latency = latency(outcomes)
        figures[name] = _group(pairs, window_s) | {
            "ttft_ms": all_latency["ttft_ms"],
            "tpot_ms": all_latency["tpot_ms"],
            "service_tokens": round(sum(service_by_tenant(outcomes, {}).values()), 1),
        }
    return figures


def _group(judged: Sequence[tuple[Outcome, Verdict]], window_s: float) -> dict[str, Any]:
    counts = Counter(found for _, found in judged)
    num_sent = len(judged) - counts[Verdict.UNSENT]
    good = [outcome for outcome, found in judged if found is Verdict.GOOD]
    num_good_tokens = sum(outcome.num_output_tokens for outcome in good)
    return {
        "sent": num_sent,
        "attempts": sum(outcome.num_attempts for outcome, found in judged if found is not Verdict.UNSENT),
        "outcomes": {str(name): counts[name] for name in Verdict if counts[name]},
        "attainment": round(len(good) / num_sent, 4) if num_sent else 0.0,
        "goodput_s": round(len(good) / window_s, 4),
        "token_goodput_s": round(num_good_tokens / window_s, 3),
    }


def _throughput(outcomes: Sequence[Outcome], span_s: float) -> dict[str, float]:
    answered = [outcome for outcome in outcomes if outcome.token_times]
    span_s = max(span_s, 1e-9)
    return {
        "requests_s": round(len(answered) / span_s, 4),
        "output_tokens_s": round(sum(outcome.num_output_tokens for outcome in answered) / span_s, 2),
        "prompt_tokens_s": round(sum(outcome.num_prompt_tokens for outcome in answered) / span_s, 2),
        "output_tokens": sum(outcome.num_output_tokens for outcome in answered),
    }


def _refusals(judged: Sequence[tuple[Outcome, Verdict]]) -> dict[str, Any]:
    """How soon a refusal came, all of them and by the limit that was named."""
    refused = [outcome for outcome, found in judged if found is Verdict.REFUSED]
    codes: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in refused:
        codes[outcome.code or "-"].append(outcome)
    return {
        "time_ms": summary_ms(outcome.time_to_refuse_s for outcome in refused),
        "by_code": {
            code: {"count": len(ones), "time_ms": summary_ms(outcome.time_to_refuse_s for outcome in ones)}
            for code, ones in sorted(codes.items())
        },
        "other_codes": dict(Counter(o.code or "-" for o, found in judged if found in _BROKEN)),
    }


_BROKEN = (Verdict.UNAVAILABLE, Verdict.INVALID, Verdict.FAILED)


def _prefix(outcomes: Sequence[Outcome]) -> dict[str, float]:
    num_prompt = sum(outcome.num_prompt_tokens for outcome in outcomes)
    num_cached = sum(outcome.num_cached_tokens for outcome in outcomes)
    return {
        "prompt_tokens": num_prompt,
        "cached_tokens": num_cached,
        "hit_ratio": round(num_cached / num_prompt, 4) if num_prompt else 0.0,
    }


def _fairness(outcomes: Sequence[Outcome], weights: Mapping[str, float]) -> dict[str, Any]:
    """Empty with one tenant."""
    service = service_by_tenant(outcomes, weights)
    if len(service) < 2:
        return {}
    return {
        "jain": round(jain_index(list(service.values())), 4),
        "max_service_gap_tokens": round(max_service_gap(outcomes, weights), 1),
        "service_tokens_per_weight": {tenant or "-": round(value, 1) for tenant, value in sorted(service.items())},
    }


def _prediction(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """How far off the server's own predictions of TTFT were, where it made any (shares of the actual TTFT)."""
    errors = sorted(
        abs(outcome.predicted_ttft_s - outcome.ttft_s) / outcome.ttft_s
        for outcome in outcomes
        if outcome.predicted_ttft_s is not None and outcome.ttft_s
    )
    if not errors:
        return {}
    return {"count": len(errors), **{name: round(percentile(errors, share), 4) for name, share in PERCENTILES[:2]}}
