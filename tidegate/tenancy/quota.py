"""How much a tenant may use: what a request takes of its limits when it comes, and gives back when it ends.

    admit ──> Granted (perhaps with less than asked) ── produced ... ──> end      prompt and answer have been used
       └────> Exceeded, with the time until it would pass   └─ no token ─> end    the prompt's tokens go back

The prompt's tokens are reserved when a request comes; those of its answer are charged as they are produced, so a limit
may be overrun by what is under way, and the debt is waited for. Requests that were refused later on go on counting as
requests: retries are load.

Owns: the limits of one tenant and all that its requests hold of them. Never: clocks, keys, or whether a request can be
served in time (admission). Invariant: after `end`, which may be called again, a request holds nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tidegate.config import DEFAULT_TIER, TenantConfig
from tidegate.tenancy.limits import Bucket, CalendarSum

Limit = Literal[
    "requests_per_minute",
    "tokens_per_minute",
    "tokens_per_day",
    "tokens_per_month",
    "max_concurrent",
    "max_prompt_tokens",
]
_GAIN = 0.1


@dataclass(frozen=True, slots=True)
class Granted:
    """How the request may be served; `changes` as an admission's downgrade names them."""

    tier: str
    max_tokens: int
    changes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Exceeded:
    """`retry_after_s` None: it never passes."""

    limit: Limit
    message: str
    retry_after_s: float | None = None


@dataclass(slots=True)
class _Hold:
    tier: str
    num_prompt_tokens: int
    started_s: float
    num_output_tokens: int = 0


@dataclass(slots=True)
class _Buckets:
    requests: Bucket | None
    tokens: Bucket | None
    by_tier: dict[str, Bucket] = field(default_factory=dict)


class TenantQuota:
    def __init__(self, config: TenantConfig, now: float, epoch_s: float = 0.0) -> None:
        """`epoch_s`: the Unix time of `now` 0."""
        self._config = config
        self._epoch_s = epoch_s
        self._buckets = _buckets(config, now, None)
        self._day = CalendarSum("day")
        self._month = CalendarSum("month")
        self._holds: dict[str, _Hold] = {}
        self._mean_duration_s = 1.0

    @property
    def num_running(self) -> int:
        return len(self._holds)

    def restore(self, day_tokens: int, month_tokens: int, now: float) -> None:
        """What was used before a restart."""
        self._day.restore(day_tokens, self._epoch_s + now)
        self._month.restore(month_tokens, self._epoch_s + now)

    def reconfigure(self, config: TenantConfig, now: float) -> None:
        """Other limits from now on; what has been used of the old ones is used of the new."""
        self._config = config
        self._buckets = _buckets(config, now, self._buckets)

    def would_exceed(self, num_prompt_tokens: int, now: float) -> Exceeded | None:
        """Why a request with at least this prompt would not pass. Changes nothing."""
        config, unix_s = self._config, self._epoch_s + now
        if config.max_prompt_tokens is not None and num_prompt_tokens > config.max_prompt_tokens:
            return Exceeded("max_prompt_tokens", _too_long(num_prompt_tokens, config.max_prompt_tokens))
        if config.max_concurrent is not None and len(self._holds) >= config.max_concurrent:
            # One of them ends after this on average; nothing is known of when exactly.
            wait_s = self._mean_duration_s / config.max_concurrent
            return Exceeded("max_concurrent", f"{config.max_concurrent} requests at once are allowed", wait_s)
        if self._buckets.requests is not None and (wait_s := self._buckets.requests.wait_s(1.0, now)) > 0.0:
            message = f"{config.requests_per_minute} requests a minute are allowed"
            return Exceeded("requests_per_minute", message, wait_s)
        if self._buckets.tokens is not None and (wait_s := self._buckets.tokens.wait_s(num_prompt_tokens, now)) > 0.0:
            message = f"{config.tokens_per_minute} tokens a minute are allowed; the prompt has {num_prompt_tokens}"
            return Exceeded("tokens_per_minute", message, None if wait_s == float("inf") else wait_s)
        for limit, allowed, used in (
            ("tokens_per_day", config.tokens_per_day, self._day),
            ("tokens_per_month", config.tokens_per_month, self._month),
        ):
            if allowed is not None and used.current(unix_s) + num_prompt_tokens > allowed:
                message = f"{allowed} tokens a {used.calendar} are allowed; {used.used:.0f} have been used"
                never = num_prompt_tokens > allowed
                return Exceeded(limit, message, None if never else used.reset_s(unix_s))  # type: ignore[arg-type]
        return None

    def admit(
        self, request_id: str, tier: str, num_prompt_tokens: int, max_tokens: int, now: float
    ) -> Granted | Exceeded:
        """Take what the request needs of every limit, or nothing of any."""
        exceeded = self.would_exceed(num_prompt_tokens, now)
        if exceeded is not None:
            return exceeded
        changes: list[str] = []
        budget = self._buckets.by_tier.get(tier)
        if tier != DEFAULT_TIER and budget is not None and budget.wait_s(num_prompt_tokens, now) > 0.0:
            tier = DEFAULT_TIER
            changes.append(f"tier:{tier}")
        longest = self._config.max_output_tokens
        if longest is not None and max_tokens > longest:
            max_tokens = longest
            changes.append(f"clamp:{longest}")
        if self._buckets.requests is not None:
            self._buckets.requests.take(1.0, now)
        self._holds[request_id] = _Hold(tier, num_prompt_tokens, now)
        self._take(tier, num_prompt_tokens, now)
        return Granted(tier, max_tokens, tuple(changes))

    def produced(self, request_id: str, num_tokens: int, now: float) -> None:
        """Tokens of the request's answer."""
        hold = self._holds.get(request_id)
        if hold is not None and num_tokens:
            hold.num_output_tokens += num_tokens
            self._take(hold.tier, num_tokens, now)

    def end(self, request_id: str, now: float) -> None:
        """The request is over. One without a token has used nothing."""
        hold = self._holds.pop(request_id, None)
        if hold is None:
            return
        if hold.num_output_tokens == 0:
            self._take(hold.tier, -hold.num_prompt_tokens, now)
        else:
            self._mean_duration_s += _GAIN * (now - hold.started_s - self._mean_duration_s)

    def headers(self, now: float) -> list[tuple[str, str]]:
        """The x-ratelimit family, as OpenAI sends it: limits a minute, what is left, and when all of it is back."""
        headers: list[tuple[str, str]] = []
        for what, bucket in (("requests", self._buckets.requests), ("tokens", self._buckets.tokens)):
            if bucket is not None:
                headers += [
                    (f"x-ratelimit-limit-{what}", f"{bucket.capacity:.0f}"),
                    (f"x-ratelimit-remaining-{what}", str(max(0, int(bucket.level(now))))),
                    (f"x-ratelimit-reset-{what}", duration_text(bucket.wait_s(bucket.capacity, now))),
                ]
        return headers

    def _take(self, tier: str, num_tokens: int, now: float) -> None:
        unix_s = self._epoch_s + now
        for bucket in (self._buckets.tokens, self._buckets.by_tier.get(tier)):
            if bucket is not None:
                bucket.take(num_tokens, now)
        self._day.take(num_tokens, unix_s)
        self._month.take(num_tokens, unix_s)


def duration_text(seconds: float) -> str:
    """As OpenAI writes it: 6m0s, 1.5s, 20ms."""
    ms = round(seconds * 1e3)
    if ms < 1_000:
        return f"{ms}ms"
    minutes, ms = divmod(ms, 60_000)
    hours, minutes = divmod(minutes, 60)
    parts = [f"{hours}h"] if hours else []
    if hours or minutes:
        parts.append(f"{minutes}m")
    return "".join([*parts, f"{ms / 1e3:g}s"])


def _too_long(num_tokens: int, limit: int) -> str:
    return f"prompts of up to {limit} tokens are allowed; this one has at least {num_tokens}"


def _buckets(config: TenantConfig, now: float, old: _Buckets | None) -> _Buckets:
    def bucket(capacity: int | None, before: Bucket | None) -> Bucket | None:
        if capacity is None:
            return None
        return Bucket(capacity, now) if before is None else before.resized(capacity, now)

    old = old or _Buckets(None, None)
    return _Buckets(
        requests=bucket(config.requests_per_minute, old.requests),
        tokens=bucket(config.tokens_per_minute, old.tokens),
        by_tier={
            tier: made
            for tier, capacity in config.tier_tokens_per_minute.items()
            if (made := bucket(capacity, old.by_tier.get(tier))) is not None
        },
    )
