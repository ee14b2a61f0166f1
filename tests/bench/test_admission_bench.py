"""The admission benchmark measures what it says: that many waiting, decisions of both kinds."""

from __future__ import annotations

from tidegate.bench.admission import measure


def test_the_queue_is_as_long_as_it_says_and_both_decisions_are_timed() -> None:
    result = measure(num_queued=40, num_timed=20)
    assert result["num_queued"] == 40
    for part in ("queued_us", "refused_us"):
        assert 0 < result[part]["p50"] <= result[part]["p99"] <= result[part]["max"]
