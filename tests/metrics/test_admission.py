"""AdmissionMetrics as a dashboard reads them."""

from __future__ import annotations

import pytest

from tests.metrics.test_registry import samples
from tidegate.metrics.registry import ServerMetrics


def test_decisions_are_counted_by_action_reason_and_tier() -> None:
    metrics = ServerMetrics()
    for _ in range(3):
        metrics.admission.count("reject", "ttft_unreachable", "flex")
    metrics.admission.count("admit", "fits", "default")
    found = samples(metrics)
    assert found["tidegate_admission_total{action=reject,reason=ttft_unreachable,tier=flex}"] == 3
    assert found["tidegate_admission_total{action=admit,reason=fits,tier=default}"] == 1


def test_predictions_are_compared_with_what_happened() -> None:
    metrics = ServerMetrics()
    metrics.admission.judge("ttft", "default", 1.1, 1.0)
    metrics.admission.judge("ttft", "default", 0.7, 1.0)
    metrics.admission.judge("tpot", "default", 0.02, 0.01)
    found = samples(metrics)
    name = "tidegate_ttft_prediction_error_ratio"
    assert found[f"{name}_bucket{{le=0.15,tier=default}}"] == 1
    assert found[f"{name}_bucket{{le=0.4,tier=default}}"] == 2
    assert found[f"{name}_count{{tier=default}}"] == 2
    assert found["tidegate_ttft_predicted_seconds_total{tier=default}"] == pytest.approx(1.8)
    assert found["tidegate_ttft_actual_seconds_total{tier=default}"] == pytest.approx(2.0)
    assert found["tidegate_tpot_prediction_error_ratio_sum{tier=default}"] == pytest.approx(1.0)


def test_what_never_happened_is_not_judged() -> None:
    metrics = ServerMetrics()
    metrics.admission.judge("ttft", "default", 1.0, 0.0)
    assert not any("tidegate_ttft_prediction_error_ratio" in name for name in samples(metrics))


def test_the_share_of_answers_within_the_predicted_length_can_be_read_off() -> None:
    metrics = ServerMetrics()
    metrics.admission.judge_length("flex", 100.0, 100)
    metrics.admission.judge_length("flex", 100.0, 101)
    found = samples(metrics)
    assert found["tidegate_output_length_p90_total{tier=flex,within=true}"] == 1
    assert found["tidegate_output_length_p90_total{tier=flex,within=false}"] == 1
