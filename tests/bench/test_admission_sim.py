"""The simulated admission benchmark: every figure is there, the same each time, and counts what it says."""

from __future__ import annotations

from tidegate.bench.admission_sim import OFF, AdmissionOptions, Machine, measure_mix
from tidegate.bench.presets import load_workload

SHORT = AdmissionOptions(duration_s=6.0)


def test_every_figure_is_there_and_the_same_each_time() -> None:
    first, second = (measure_mix(SHORT, "uniform", lambda text: None) for _ in range(2))
    assert first == second
    assert first["capacity"] > 0.0
    assert [point["multiple"] for point in first["curve"]] == [0.5, 1.0, 1.5, 2.0, 3.0, 4.0]
    assert set(first["prediction"]) == {"0.9x", "2x", "load step"}
    assert first["priority"]["ttft_p99_alone_s"] > 0.0
    assert first["retries"]["attempts"] > first["retries"]["requests"]


def test_admission_is_worth_something_under_overload() -> None:
    machine = Machine(SHORT, load_workload("uniform"))
    items = machine.items(8.0, duration_s=20.0)
    assert machine.run(items).goodput > 2.0 * machine.run(items, gate=OFF).goodput


def test_each_mix_has_objectives_for_its_classes() -> None:
    objectives = Machine(SHORT, load_workload("heavy")).simulation.objectives
    assert objectives.ttft_s["long"] > 10 * objectives.ttft_s["short"]
    assert set(objectives.tpot_s) == {"short", "long"}
