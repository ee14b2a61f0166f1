"""The scheduler benchmark measures what it says: that many running and waiting, throughout."""

from __future__ import annotations

import pytest

from tidegate.bench import scheduler
from tidegate.bench.scheduler import Case, measure


def test_slots_stay_taken_and_the_queue_stays_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "settle_garbage_collection", lambda: None)  # it is this process's own business
    case = Case("", num_running=8, num_waiting=20, num_blocks=400, num_batched_tokens=2_048, num_steps=0, limit_ms=1)
    result = measure(case, num_steps=1_500)
    assert 7.5 <= result["running_mean"] <= 8
    assert 19 <= result["waiting"] <= 21
    assert result["evictions"] > 0
    assert 0 < result["total_ms"]["p50"] <= result["total_ms"]["p99"] <= result["total_ms"]["max"]
