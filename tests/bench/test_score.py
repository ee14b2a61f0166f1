"""Scores: what is good, what is not, and figures that can be worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from tidegate.bench.fairness import jain_index, max_service_gap
from tidegate.bench.objectives import Objective, Unloaded, objectives_for
from tidegate.bench.outcome import Ending, Outcome
from tidegate.bench.presets import PRESETS
from tidegate.bench.score import Objectives, Verdict, score, verdict
from tidegate.bench.workload import Segment, WorkItem
from tidegate.config import ConfigError

OBJECTIVES = Objectives({"all": 1.0}, {"all": 0.1})


def item(index: int = 0, **changes: Any) -> WorkItem:
    values: dict[str, Any] = {
        "index": index, "arrival_s": 0.0, "content": (Segment(index, 10),), "max_tokens": 5, "num_output_tokens": 5,
        "ignore_eos": True, "length_class": "all",
    }  # fmt: skip
    return WorkItem(**(values | changes))


def answered(first_s: float, gap_s: float, num: int = 5, *, arrival_s: float = 0.0, **changes: Any) -> Outcome:
    times = [arrival_s + first_s + gap_s * place for place in range(num)]
    values: dict[str, Any] = {
        "item": item(), "ending": Ending.COMPLETE, "arrival_s": arrival_s, "ended_s": times[-1], "token_times": times,
        "num_output_tokens": num, "num_prompt_tokens": 10,
    }  # fmt: skip
    return Outcome(**(values | changes))


def refused(after_s: float, code: str = "queue_full", **changes: Any) -> Outcome:
    return Outcome(item(**changes), Ending.REFUSED, 0.0, after_s, code=code)


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (answered(1.0, 0.1), Verdict.GOOD),
        (answered(1.001, 0.1), Verdict.LATE),
        (answered(1.0, 0.1001), Verdict.LATE),
        (answered(0.5, 9.0, num=1), Verdict.GOOD),
        (answered(0.5, 0.05, is_downgraded=True), Verdict.DOWNGRADED),
        (answered(0.5, 0.05, ending=Ending.SHORT, is_downgraded=True), Verdict.DOWNGRADED),
        (answered(0.5, 0.05, ending=Ending.SHORT), Verdict.SHORT),
        (refused(0.1), Verdict.REFUSED),
    ],
)
def test_verdicts(outcome: Outcome, expected: Verdict) -> None:
    assert verdict(outcome, OBJECTIVES) is expected


def test_latencies_count_from_when_the_request_was_due() -> None:
    outcome = answered(0.5, 0.1, arrival_s=3.0, send_lag_s=0.4)
    assert outcome.ttft_s == pytest.approx(0.5)
    assert outcome.tpot_s == pytest.approx(0.1)
    assert outcome.e2e_s == pytest.approx(0.9)


def test_goodput_counts_good_requests_over_the_time_of_arrivals() -> None:
    outcomes = [
        *(answered(0.5, 0.05) for _ in range(6)),
        answered(5.0, 0.05, num_cached_tokens=4),
        refused(0.02),
        refused(0.04, code="ttft_unreachable"),
        Outcome(item(), Ending.UNSENT, 0.0, 0.0, num_attempts=0),
    ]
    figures = score(outcomes, OBJECTIVES, 2.0)
    assert figures["sent"] == 9
    assert figures["outcomes"] == {"good": 6, "late": 1, "refused": 2, "unsent": 1}
    assert figures["goodput_s"] == 3.0
    assert figures["token_goodput_s"] == 15.0
    assert figures["attainment"] == pytest.approx(6 / 9, abs=1e-4)
    assert figures["throughput"]["output_tokens"] == 35
    assert figures["refusals"]["time_ms"]["max"] == 40.0
    assert {code: one["count"] for code, one in figures["refusals"]["by_code"].items()} == {
        "queue_full": 1, "ttft_unreachable": 1,
    }  # fmt: skip
    assert figures["prefix"] == {"prompt_tokens": 70, "cached_tokens": 4, "hit_ratio": pytest.approx(4 / 70, abs=1e-4)}
    assert figures["latency"]["ttft_ms"]["p50"] == 500.0
    assert figures["fairness"] == {}


def test_groups_are_judged_apart() -> None:
    outcomes = [
        answered(0.5, 0.05, item=item(tier="priority", tenant="a")),
        answered(3.0, 0.05, item=item(tier="flex", tenant="b", length_class="long")),
    ]
    figures = score(outcomes, Objectives({"all": 1.0, "long": 4.0}, {}), 1.0)
    assert figures["outcomes"] == {"good": 2}
    assert set(figures["by_tier"]) == {"priority", "flex"}
    assert figures["by_class"]["long"]["ttft_ms"]["p50"] == 3_000.0
    assert figures["fairness"]["jain"] == 1.0


def test_an_empty_run_has_figures_too() -> None:
    figures = score([], OBJECTIVES, 1.0)
    assert (figures["sent"], figures["attainment"], figures["latency"]["ttft_ms"]) == (0, 0.0, {})


def test_predictions_are_compared_with_what_happened() -> None:
    outcomes = [answered(1.0, 0.1, predicted_ttft_s=value) for value in (0.9, 1.0, 1.5)]
    assert score(outcomes, OBJECTIVES, 1.0)["prediction"] == {"count": 3, "p50": 0.1, "p90": pytest.approx(0.42)}


@pytest.mark.parametrize(("values", "index"), [([1, 1, 1], 1.0), ([1, 0, 0], 1 / 3), ([], 1.0), ([0, 0], 1.0)])
def test_jain(values: list[float], index: float) -> None:
    assert jain_index(values) == pytest.approx(index)


def test_the_service_gap_is_what_built_up_while_both_had_work() -> None:
    def one(tenant: str, times: list[float], arrival_s: float, ended_s: float) -> Outcome:
        return Outcome(
            item(tenant=tenant), Ending.COMPLETE, arrival_s, ended_s, token_times=times, num_output_tokens=len(times)
        )

    # b waits from 2 on; a's tokens before that are nobody's loss. Until 10, a gets 6 tokens and b none.
    outcomes = [one("a", [1.0, 1.5, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], 0.0, 20.0), one("b", [10.0, 11.0], 2.0, 11.0)]
    assert max_service_gap(outcomes, {}) == 6.0
    assert max_service_gap(outcomes, {"a": 2.0}) == 3.0
    assert max_service_gap(outcomes[:1], {}) == 0.0


def test_objectives_are_times_or_multiples_of_unloaded() -> None:
    unloaded = Unloaded({"short": 0.1, "long": 2.0}, {"short": 0.02, "long": 0.03})
    objectives = objectives_for(
        PRESETS["heavy"], Objective.parse("5x", "--ttft-slo"), Objective.parse("150ms", "--tpot-slo"), unloaded
    )
    assert objectives.ttft_s == {"short": 0.5, "long": 10.0}
    assert objectives.tpot_s == {"short": 0.15, "long": 0.15}


@pytest.mark.parametrize("text", ["fast", "0x", "0s", "-1x", "x", "nanx"])
def test_what_is_no_objective_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--ttft-slo"):
        Objective.parse(text, "--ttft-slo")
