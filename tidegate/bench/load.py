"""The open-loop load generator: sends WorkItems when they are due, whatever the server does, and keeps what came back.

    schedule (due times) ─> one task a request ─> call() ─> retries ─> Outcome
                               └─ a conversation's next turn begins when this one has ended

Latencies count from the due time, so that a client or a server that falls behind cannot hide it. One process holds a
thousand streams and more; whether it kept up is measured too (send lag, delay of the event loop) and reported.
Owns: sending, conversations, retries as the openai client makes them, closed loops. Never does: judge.
"""

from __future__ import annotations

import asyncio
import random
import resource
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tidegate.bench.body import RequestBodies
from tidegate.bench.client import CallRecord, Endpoint, call
from tidegate.bench.outcome import Ending, Outcome
from tidegate.bench.workload import WorkItem

MAX_RETRIES = 2
_RETRY_STATUSES = frozenset((408, 409, 429))
_FIRST_RETRY_S = 0.5
_LAST_RETRY_S = 8.0
_MAX_RETRY_AFTER_S = 60.0
_TICK_S = 0.02
_NUM_FILES = 65_536


@dataclass
class LoadRun:
    """What a run brought: outcomes in order of their items, and how well the client itself kept up."""

    outcomes: list[Outcome] = field(default_factory=list)
    window_s: float = 0.0
    started_s: float = 0.0
    loop_delays_s: list[float] = field(default_factory=list)
    max_open: int = 0
    is_interrupted: bool = False


@dataclass(frozen=True)
class LoadOptions:
    """`end_s` ends a closed loop and nothing else. `timeout_s` is for one attempt."""

    retries: bool = False
    timeout_s: float = 600.0
    end_s: float | None = None


class LoadGenerator:
    """One run against one endpoint. `run.outcomes` is there at any time, also after a cancellation."""

    def __init__(
        self,
        endpoint: Endpoint,
        items: Sequence[WorkItem],
        bodies: RequestBodies,
        options: LoadOptions | None = None,
        on_outcome: Callable[[Outcome], None] | None = None,
    ) -> None:
        self.run = LoadRun()
        self._endpoint = endpoint
        self._bodies = bodies
        self._options = options or LoadOptions()
        self._on_outcome = on_outcome
        self._roots = [item for item in items if item.parent is None and item.client is None]
        self._turns = {item.parent: item for item in items if item.parent is not None}
        self._clients: dict[int, list[WorkItem]] = defaultdict(list)
        for item in items:
            if item.client is not None:
                self._clients[item.client].append(item)
        self._start_s = 0.0
        self._num_open = 0
        self._jitter = random.Random(0)

    async def send_all(self) -> LoadRun:
        """Until every answer is there. When cancelled, requests in flight are dropped and those that ended remain."""
        _raise_file_limit()
        self._start_s = self.run.started_s = time.monotonic()
        monitor = asyncio.create_task(self._watch_loop())
        try:
            async with asyncio.TaskGroup() as group:
                for items in self._clients.values():
                    group.create_task(self._closed_client(items))
                for item in self._roots:
                    body = self._bodies.first(item)
                    await self._sleep_until(item.arrival_s)
                    group.create_task(self._conversation(item, body, item.arrival_s))
        except asyncio.CancelledError:
            self.run.is_interrupted = True
            raise
        finally:
            monitor.cancel()
            self.run.window_s = time.monotonic() - self._start_s
            self.run.outcomes.sort(key=lambda outcome: outcome.item.index)
        return self.run

    async def _closed_client(self, items: Sequence[WorkItem]) -> None:
        for item in items:
            body = self._bodies.first(item)
            if item.arrival_s:
                await asyncio.sleep(item.arrival_s)
            if self._options.end_s is not None and self._now() >= self._options.end_s:
                return
            await self._conversation(item, body, self._now())

    async def _conversation(self, item: WorkItem, body: bytes, due_s: float) -> None:
        """A request and the turns that follow it. A turn that fails ends the conversation."""
        transcript = self._bodies.transcript(item)
        while True:
            follower = self._turns.get(item.index)
            outcome, record = await self._request(item, body, due_s, keep_text=follower is not None)
            self._note(outcome)
            if follower is None:
                return
            if outcome.ending not in (Ending.COMPLETE, Ending.SHORT):
                self._note_unsent(follower)
                return
            transcript = self._bodies.answered(transcript, record.text, follower)
            item, body = follower, self._bodies.next(follower, transcript)
            due_s = outcome.ended_s + follower.arrival_s
            await self._sleep_until(due_s)

    async def _request(
        self, item: WorkItem, body: bytes, due_s: float, *, keep_text: bool
    ) -> tuple[Outcome, CallRecord]:
        headers = {} if item.api_key is None else {"Authorization": f"Bearer {item.api_key}"}
        endpoint = self._endpoint
        request = endpoint.head("POST", self._bodies.path, len(body), headers) + body
        num_attempts = 0
        send_lag_s = max(0.0, self._now() - due_s)
        self._num_open += 1
        self.run.max_open = max(self.run.max_open, self._num_open)
        try:
            while True:
                num_attempts += 1
                record = await call(
                    endpoint,
                    request,
                    hang_up_after=item.hang_up_after,
                    keep_text=keep_text,
                    timeout_s=self._options.timeout_s,
                )
                if not self._options.retries or num_attempts > MAX_RETRIES or not _may_retry(record):
                    break
                await asyncio.sleep(_retry_delay_s(record, num_attempts, self._jitter))
        finally:
            self._num_open -= 1
        outcome = outcome_of(item, record, due_s, self._start_s)
        outcome.num_attempts = num_attempts
        if num_attempts > 1:
            outcome.last_attempt_s = record.connect_s - self._start_s
        outcome.send_lag_s = send_lag_s
        return outcome, record

    def _note(self, outcome: Outcome) -> None:
        self.run.outcomes.append(outcome)
        if self._on_outcome is not None:
            self._on_outcome(outcome)

    def _note_unsent(self, item: WorkItem | None) -> None:
        while item is not None:
            now = self._now()
            self._note(Outcome(item, Ending.UNSENT, now, now, num_attempts=0))
            item = self._turns.get(item.index)

    async def _sleep_until(self, time_s: float) -> None:
        delay_s = time_s - self._now()
        # Also when it is late: tasks must get to run.
        await asyncio.sleep(max(0.0, delay_s))

    async def _watch_loop(self) -> None:
        """How late this process gets to do what is due: what a read at the socket may be late, too."""
        while True:
            due_s = time.monotonic() + _TICK_S
            await asyncio.sleep(_TICK_S)
            self.run.loop_delays_s.append(max(0.0, time.monotonic() - due_s))

    def _now(self) -> float:
        return time.monotonic() - self._start_s


def outcome_of(item: WorkItem, record: CallRecord, due_s: float, start_s: float) -> Outcome:
    """What the record means for the one who sent the item."""
    ending, code = _ending(item, record)
    admission = record.headers.get("x-tidegate-admission", "")
    other_tier = bool(item.tier and record.service_tier and record.service_tier != item.tier)
    num_prompt_tokens = record.num_prompt_tokens or (item.num_prompt_tokens if record.event_times else 0)
    return Outcome(
        item=item,
        ending=ending,
        arrival_s=due_s,
        answered_s=record.answered_s - start_s if record.answered_s else 0.0,
        ended_s=record.ended_s - start_s,
        token_times=[time_s - start_s for time_s in record.event_times],
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=record.num_output_tokens,
        num_cached_tokens=record.num_cached_tokens,
        served_tier=record.service_tier,
        is_downgraded=other_tier or admission.startswith("downgrade"),
        code=code,
        predicted_ttft_s=_predicted_ttft_s(admission),
    )


def _ending(item: WorkItem, record: CallRecord) -> tuple[Ending, str]:
    """How it ended, and the code or message that says why where that is no answer."""
    if record.status == 200:
        if record.has_hung_up:
            return Ending.COMPLETE, ""
        if not record.is_complete:
            return Ending.FAILED, record.error or "no end"
        # A stream may hold fewer events than tokens, so the server's count is what counts.
        is_whole = record.num_output_tokens >= item.num_output_tokens or record.finish_reason == "stop"
        return (Ending.COMPLETE if is_whole else Ending.SHORT), ""
    if record.status == 0:
        return Ending.FAILED, record.error
    code = _error_code(record.body) or str(record.status)
    if record.status == 429:
        return Ending.REFUSED, code
    return (Ending.INVALID if 400 <= record.status < 500 else Ending.UNAVAILABLE), code


def _error_code(body: bytes) -> str:
    try:
        error: Any = msgspec.json.decode(body)
        return str(error["error"].get("code") or "")
    except (msgspec.MsgspecError, KeyError, TypeError, AttributeError):
        return ""


def _predicted_ttft_s(admission: str) -> float | None:
    """From `queue; reason=prefill_backlog; predicted_ttft_ms=840`."""
    for part in admission.split(";"):
        name, _, value = part.strip().partition("=")
        if name == "predicted_ttft_ms":
            try:
                return float(value) / 1e3
            except ValueError:
                return None
    return None


def _may_retry(record: CallRecord) -> bool:
    """The openai client's rule: the server's word first, then the status; a stream that has begun is never retried."""
    if record.event_times or record.status == 200:
        return False
    advice = record.headers.get("x-should-retry")
    if advice in ("true", "false"):
        return advice == "true"
    return record.status == 0 or record.status in _RETRY_STATUSES or record.status >= 500


def _retry_delay_s(record: CallRecord, num_attempts: int, rng: random.Random) -> float:
    try:
        retry_after_s = float(record.headers.get("retry-after", ""))
    except ValueError:
        retry_after_s = 0.0
    if 0.0 < retry_after_s <= _MAX_RETRY_AFTER_S:
        return retry_after_s
    return min(_LAST_RETRY_S, _FIRST_RETRY_S * 2.0 ** (num_attempts - 1)) * (1.0 - 0.25 * rng.random())


def _raise_file_limit() -> None:
    """A stream is a file; the usual soft limit of 1,024 is too few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _NUM_FILES if hard == resource.RLIM_INFINITY else min(hard, _NUM_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
