"""Quotas: what passes, what is given back, and when the next would pass."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.config import TenantConfig
from tidegate.tenancy.limits import Bucket, CalendarSum, window_start
from tidegate.tenancy.quota import Exceeded, Granted, TenantQuota, duration_text


def quota(epoch_s: float = 0.0, **limits: Any) -> TenantQuota:
    return TenantQuota(TenantConfig(**limits), 0.0, epoch_s)


def admit(
    tenant: TenantQuota, name: str, now: float, prompt: int = 10, tier: str = "default", max_tokens: int = 100
) -> Granted | Exceeded:
    return tenant.admit(name, tier, prompt, max_tokens, now)


def refused(decision: Granted | Exceeded) -> Exceeded:
    assert isinstance(decision, Exceeded)
    return decision


def test_a_request_that_is_refused_passes_after_the_time_it_was_told() -> None:
    tenant = quota(requests_per_minute=6)
    for i in range(6):
        assert isinstance(admit(tenant, f"r{i}", 0.0), Granted)
    told = refused(admit(tenant, "r6", 0.0))
    assert told.limit == "requests_per_minute"
    assert told.retry_after_s == pytest.approx(10.0)
    assert isinstance(admit(tenant, "r6", 9.9), Exceeded)
    assert isinstance(admit(tenant, "r6", 10.0), Granted)
    assert isinstance(admit(tenant, "r7", 10.0), Exceeded)


def test_tokens_are_reserved_at_once_charged_as_produced_and_the_debt_is_waited_for() -> None:
    tenant = quota(tokens_per_minute=600)
    admit(tenant, "a", 0.0, prompt=400)
    assert refused(admit(tenant, "b", 0.0, prompt=300)).retry_after_s == pytest.approx(10.0)
    tenant.produced("a", 500, 0.0)
    tenant.end("a", 0.0)
    told = refused(admit(tenant, "b", 0.0, prompt=300))
    assert told.limit == "tokens_per_minute"
    assert told.retry_after_s == pytest.approx(60.0)
    assert isinstance(admit(tenant, "b", 60.0, prompt=300), Granted)


def test_a_request_without_a_token_gives_its_prompt_back_and_one_that_was_cut_pays_for_what_it_got() -> None:
    tenant = quota(tokens_per_minute=600, tokens_per_day=1000)
    admit(tenant, "refused", 0.0, prompt=600)
    tenant.end("refused", 0.0)
    tenant.end("refused", 0.0)
    admit(tenant, "cut", 0.0, prompt=500)
    tenant.produced("cut", 10, 0.0)
    tenant.end("cut", 0.0)
    tenant.produced("cut", 10, 0.0)
    assert dict(tenant.headers(0.0))["x-ratelimit-remaining-tokens"] == "90"


def test_a_refusal_takes_nothing_of_any_limit() -> None:
    tenant = quota(requests_per_minute=10, tokens_per_minute=100)
    refused(admit(tenant, "a", 0.0, prompt=200))
    assert dict(tenant.headers(0.0))["x-ratelimit-remaining-requests"] == "10"
    assert tenant.num_running == 0


def test_what_can_never_pass_has_no_time_to_wait_for() -> None:
    assert refused(admit(quota(tokens_per_minute=100), "a", 0.0, prompt=101)).retry_after_s is None
    assert refused(admit(quota(tokens_per_day=100), "a", 0.0, prompt=101)).retry_after_s is None
    told = refused(admit(quota(max_prompt_tokens=100), "a", 0.0, prompt=101))
    assert (told.limit, told.retry_after_s) == ("max_prompt_tokens", None)


def test_so_many_at_once_and_one_more_when_one_has_ended() -> None:
    tenant = quota(max_concurrent=2)
    admit(tenant, "a", 0.0)
    admit(tenant, "b", 0.0)
    assert refused(admit(tenant, "c", 0.0)).limit == "max_concurrent"
    tenant.end("a", 1.0)
    assert isinstance(admit(tenant, "c", 1.0), Granted)


def test_a_day_ends_at_midnight_utc_and_what_was_used_before_a_restart_counts() -> None:
    evening = datetime(2024, 2, 29, 23, 0, tzinfo=UTC).timestamp()
    tenant = quota(evening, tokens_per_day=1000, tokens_per_month=5000)
    tenant.restore(950, 4000, 0.0)
    told = refused(admit(tenant, "a", 0.0, prompt=100))
    assert told.limit == "tokens_per_day"
    assert told.retry_after_s == pytest.approx(3600.0)
    assert isinstance(admit(tenant, "a", 3600.0, prompt=100), Granted)
    month = quota(evening, tokens_per_month=5000)
    month.restore(0, 4950, 0.0)
    assert refused(admit(month, "a", 0.0, prompt=100)).retry_after_s == pytest.approx(3600.0)


def test_beyond_its_budget_a_tier_is_served_as_default_and_said_so() -> None:
    tenant = quota(tier_tokens_per_minute={"priority": 100})
    assert admit(tenant, "a", 0.0, prompt=60, tier="priority") == Granted("priority", 100)
    tenant.produced("a", 30, 0.0)
    assert admit(tenant, "b", 0.0, prompt=60, tier="priority") == Granted("default", 100, ("tier:default",))
    assert admit(tenant, "c", 0.0, prompt=60, tier="flex") == Granted("flex", 100)
    assert admit(tenant, "d", 60.0, prompt=60, tier="priority") == Granted("priority", 100)
    tenant = quota(tier_tokens_per_minute={"priority": 0})
    assert admit(tenant, "a", 0.0, tier="priority") == Granted("default", 100, ("tier:default",))


def test_a_longer_answer_than_allowed_is_cut_and_said_so() -> None:
    tenant = quota(max_output_tokens=50)
    assert admit(tenant, "a", 0.0, max_tokens=51) == Granted("default", 50, ("clamp:50",))
    assert admit(tenant, "b", 0.0, max_tokens=50) == Granted("default", 50)


def test_the_headers_are_those_of_openai() -> None:
    tenant = quota(requests_per_minute=60, tokens_per_minute=6000)
    admit(tenant, "a", 0.0, prompt=150)
    assert dict(tenant.headers(0.0)) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "6000",
        "x-ratelimit-remaining-tokens": "5850",
        "x-ratelimit-reset-tokens": "1.5s",
    }
    assert quota().headers(0.0) == []
    assert [duration_text(s) for s in (0.0, 0.02, 360.0, 3661.5)] == ["0ms", "20ms", "6m0s", "1h1m1.5s"]


def test_new_limits_keep_what_has_been_used() -> None:
    tenant = quota(tokens_per_minute=1000)
    admit(tenant, "a", 0.0, prompt=400)
    tenant.reconfigure(TenantConfig(tokens_per_minute=2000), 0.0)
    assert dict(tenant.headers(0.0))["x-ratelimit-remaining-tokens"] == "1600"
    tenant.reconfigure(TenantConfig(tokens_per_minute=300), 0.0)
    assert refused(admit(tenant, "b", 0.0, prompt=100)).retry_after_s == pytest.approx(40.0)
    tenant.end("a", 0.0)
    assert isinstance(admit(tenant, "b", 0.0, prompt=300), Granted)


@given(st.datetimes(datetime(1970, 1, 1), datetime(2400, 1, 1)))
def test_days_and_months_are_those_of_the_calendar(when: datetime) -> None:
    when = when.replace(tzinfo=UTC)
    month = when.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    following = month.replace(year=month.year + month.month // 12, month=month.month % 12 + 1)
    unix_s = when.timestamp()
    assert window_start("month", unix_s) == month.timestamp()
    assert window_start("month", unix_s, 1) == following.timestamp()
    assert CalendarSum("month").reset_s(unix_s) == following.timestamp() - unix_s


@given(st.lists(st.tuples(st.floats(0, 50), st.integers(1, 200)), max_size=60))
def test_in_any_time_no_more_flows_than_a_full_bucket_and_its_refill(steps: list[tuple[float, int]]) -> None:
    bucket, now, taken = Bucket(120.0, 0.0), 0.0, 0
    for gap_s, amount in steps:
        now += gap_s
        if bucket.wait_s(amount, now) == 0.0:
            bucket.take(amount, now)
            taken += amount
        assert taken <= 120 + 2.0 * now + 1e-6
