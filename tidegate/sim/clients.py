"""Clients of a simulated service: WorkItems become Requests when they are due, and what comes back becomes Outcomes.

As the load generator's, in simulated time: open arrivals, conversations that resend what was answered, closed loops,
hang-ups, retries as the openai client makes them. Requests are made when they are due and their prompts forgotten when
they end, so that a trace of any length takes the memory of what is in flight, and of one Outcome a request.

Content: a Segment is spelled as a run of equally spaced ids from a start, both drawn from its key, since making random
ids would take longer than simulating what becomes of them. Equal keys are equal ids.
"""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from tidegate.api.errors import ERROR_TABLE
from tidegate.api.errors import Outcome as ApiOutcome
from tidegate.bench.load import MAX_RETRIES
from tidegate.bench.outcome import Ending, Outcome
from tidegate.bench.score import Objectives
from tidegate.bench.workload import Segment, WorkItem
from tidegate.request import Request, SamplingParams
from tidegate.sim.simulator import SimArrival, SimOutcome, Simulator

_START_BITS = 30
_STRIDE_BITS = 11
_MAX_SEGMENT = 1 << 19  # so that the largest id stays below 2^31
_FIRST_RETRY_S = 0.5
_LAST_RETRY_S = 8.0
_MAX_RETRY_AFTER_S = 60.0
_MAX_KEPT_TIMES = 8_000_000
_PARAMS = SamplingParams(ignore_eos=True)


def segment_ids(segment: Segment) -> list[int]:
    if segment.num_tokens > _MAX_SEGMENT:
        raise ValueError(f"a segment of {segment.num_tokens} tokens; the most is {_MAX_SEGMENT}")
    start = segment.key & ((1 << _START_BITS) - 1)
    stride = 1 + ((segment.key >> _START_BITS) & ((1 << _STRIDE_BITS) - 1))
    return list(range(start, start + stride * segment.num_tokens, stride))


@dataclass(frozen=True)
class ClientOptions:
    """`end_s` ends a closed loop and nothing else. `objectives` are sent along as each request's own."""

    objectives: Objectives | None = None
    retries: bool = False
    end_s: float | None = None
    seed: int = 0


class SimClients:
    """One run. `outcomes` are in order of their items; `on_outcome` is told of each as it comes."""

    def __init__(
        self,
        items: Sequence[WorkItem],
        options: ClientOptions,
        on_outcome: Callable[[Outcome, SimOutcome | None], None] | None = None,
    ) -> None:
        self._items = items
        self._options = options
        self._on_outcome = on_outcome
        self._turns = {item.parent: item for item in items if item.parent is not None}
        self._closed: dict[int, Iterator[WorkItem]] = {}
        # Of so many requests one keeps the time of each token; they are all there is of gaps between tokens to report.
        self._keep_every = 1 + sum(item.num_output_tokens for item in items) // _MAX_KEPT_TIMES
        self._jitter = random.Random(f"{options.seed} retries")
        self._open: dict[str, _Open] = {}
        self.outcomes: list[Outcome] = []
        self._simulator: Simulator | None = None

    def run(self, simulator: Simulator) -> list[Outcome]:
        """To the end. `simulator` must have been made with `on_end=self.ended`."""
        self._simulator = simulator
        clients: dict[int, list[WorkItem]] = {}
        for item in self._items:
            if item.client is not None:
                clients.setdefault(item.client, []).append(item)
        for client, items in clients.items():
            self._closed[client] = iter(items)
            self._next_of(client)
        roots = (item for item in self._items if item.parent is None and item.client is None)
        self._next_arrival(iter(roots))
        simulator.run()
        self.outcomes.sort(key=lambda outcome: outcome.item.index)
        return self.outcomes

    def _next_arrival(self, roots: Iterator[WorkItem]) -> None:
        item = next(roots, None)
        if item is not None:

            def arrive() -> None:
                self._send(_Open(item, item.arrival_s, _ids(item.content)))
                self._next_arrival(roots)

            self._sim.at(item.arrival_s, arrive)

    def _next_of(self, client: int) -> None:
        """A closed loop's client pauses, and sends its next request."""
        item = next(self._closed[client], None)
        if item is None:
            return
        due_s = self._sim.clock.now() + item.arrival_s
        if self._options.end_s is None or due_s < self._options.end_s:
            self._sim.at(due_s, lambda: self._send(_Open(item, due_s, _ids(item.content))))

    @property
    def _sim(self) -> Simulator:
        assert self._simulator is not None
        return self._simulator

    def _send(self, request: _Open) -> None:
        item, objectives = request.item, self._options.objectives
        request.num_attempts += 1
        now = self._sim.clock.now()
        request_id = f"r{item.index}" if request.num_attempts == 1 else f"r{item.index}.{request.num_attempts}"
        self._open[request_id] = request
        request.sent_s = now
        arrival = SimArrival(
            Request(
                request_id=request_id,
                prompt_token_ids=request.prompt_token_ids,
                params=_PARAMS,
                max_tokens=item.max_tokens,
                seed=item.index,
                arrival_s=now,
                tenant=item.tenant,
                tier=item.tier or "default",
                ttft_slo_s=objectives.ttft_s.get(item.length_class) if objectives else None,
                tpot_slo_s=objectives.tpot_s.get(item.length_class) if objectives else None,
                session_id=item.session_id,
            ),
            item.hang_up_after,
        )
        self._sim.submit(arrival, keep_tokens=item.index in self._turns)

    def ended(self, result: SimOutcome) -> None:
        request = self._open.pop(result.request.request_id)
        now = self._sim.clock.now()
        if self._will_retry(request, result):
            delay_s = self._retry_delay_s(result, request.num_attempts)
            self._sim.at(now + delay_s, lambda: self._send(request))
            return
        outcome = outcome_of(request, result)
        if request.item.index % self._keep_every and len(result.token_times) > 2:
            outcome.token_times = array("d", (result.token_times[0], result.token_times[-1]))
            outcome.is_thinned = True
        self._note(outcome, result)
        item = request.item
        follower = self._turns.get(item.index)
        if follower is not None:
            if outcome.ending in (Ending.COMPLETE, Ending.SHORT):
                due_s = now + follower.arrival_s
                prompt = [*request.prompt_token_ids, *(result.token_ids or ()), *_ids(follower.content)]
                self._sim.at(due_s, lambda: self._send(_Open(follower, due_s, prompt)))
            else:
                self._note_unsent(follower)
        if item.client is not None:
            self._next_of(item.client)
        result.request.prompt_token_ids = []  # nobody reads it any more

    def _note(self, outcome: Outcome, result: SimOutcome | None) -> None:
        self.outcomes.append(outcome)
        if self._on_outcome is not None:
            self._on_outcome(outcome, result)

    def _note_unsent(self, item: WorkItem | None) -> None:
        now = self._sim.clock.now()
        while item is not None:
            self._note(Outcome(item, Ending.UNSENT, now, now, num_attempts=0), None)
            item = self._turns.get(item.index)

    def _will_retry(self, request: _Open, result: SimOutcome) -> bool:
        if not self._options.retries or request.num_attempts > MAX_RETRIES or result.first_token_s is not None:
            return False
        row = ERROR_TABLE.get(_api_outcome(result.outcome))
        return row is not None and row.should_retry

    def _retry_delay_s(self, result: SimOutcome, num_attempts: int) -> float:
        retry_after_s = result.retry_after_s
        if retry_after_s is None:
            retry_after_s = ERROR_TABLE[_api_outcome(result.outcome)].retry_after_s or 0.0
        retry_after_s = math.ceil(retry_after_s)
        if 0.0 < retry_after_s <= _MAX_RETRY_AFTER_S:
            return retry_after_s
        return min(_LAST_RETRY_S, _FIRST_RETRY_S * 2.0 ** (num_attempts - 1)) * (1.0 - 0.25 * self._jitter.random())


@dataclass
class _Open:
    """A request of a client that has not ended, over all its attempts."""

    item: WorkItem
    due_s: float
    prompt_token_ids: list[int]
    num_attempts: int = 0
    sent_s: float = 0.0


def _ids(content: Iterable[Segment]) -> list[int]:
    return [token_id for segment in content for token_id in segment_ids(segment)]


def _api_outcome(outcome: str) -> ApiOutcome:
    try:
        return ApiOutcome(outcome)
    except ValueError:
        return ApiOutcome.ERROR


def outcome_of(request: _Open, result: SimOutcome) -> Outcome:
    ended_s = result.ended_s or 0.0
    ending, code = _ending(request.item, result)
    served_tier = result.served.tier if result.served is not None else ""
    return Outcome(
        item=request.item,
        ending=ending,
        arrival_s=request.due_s,
        ended_s=ended_s,
        answered_s=result.first_token_s or 0.0,
        token_times=result.token_times,
        num_prompt_tokens=len(request.prompt_token_ids),
        num_output_tokens=result.num_output_tokens,
        num_cached_tokens=result.num_cached_tokens,
        served_tier=served_tier,
        is_downgraded=result.is_downgraded,
        code=code,
        num_attempts=request.num_attempts,
        last_attempt_s=request.sent_s if request.num_attempts > 1 else None,
        predicted_ttft_s=result.predicted_ttft_s,
    )


def _ending(item: WorkItem, result: SimOutcome) -> tuple[Ending, str]:
    how = result.outcome
    if how == "hung_up":
        return Ending.COMPLETE, ""
    if how in ("stop", "length", "timeout") and result.num_output_tokens:
        is_whole = result.num_output_tokens >= item.num_output_tokens
        return (Ending.COMPLETE if is_whole else Ending.SHORT), ""
    row = ERROR_TABLE.get(_api_outcome(how))
    if row is None or result.num_output_tokens:
        return Ending.FAILED, how
    if row.status == 429:
        return Ending.REFUSED, how
    return (Ending.INVALID if row.status < 500 else Ending.UNAVAILABLE), how


__all__ = ["ClientOptions", "SimClients", "outcome_of", "segment_ids"]
