"""Timeline: when each thing happened to one request. Every latency metric is derived from it, and from nowhere else.

Owns: the milestones, the counts, and what follows from them (TTFT, TPOT, ITL, E2E, the parts of a TTFT, its main
cause). Never does: read a clock, or judge whether a latency was good enough.

    received   tokenized    queued     dispatched   worker       scheduled      first token  first output
       │           │           │           │       received          │               │            │
       │ tokenize  │      gate wait        │ dispatch  │ batch wait  │ own prefill   │  dispatch  │
       │           │(admission)│           │           │             │ + interference│ (way back) │
       └───────────┴───────────┴───────────┴──────── TTFT ───────────┴───────────────┴────────────┘

After it: first byte (handed to the socket), last token, finished.
Invariant: the six parts add up to the TTFT. `dispatch` holds both hops, to the worker and back: it is the round trip
less the time that the worker accounts for, and so needs no common clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tidegate.metrics.histogram import Histogram
from tidegate.request import PrefillTimes, RequestOutput


class Cause(StrEnum):
    """What most of a TTFT, or of the wait for one that never came, was spent on."""

    TOKENIZE = "tokenize"  # parsing, chat template, tokenizing
    ADMISSION = "admission"  # deciding on it
    QUEUE = "queue"  # waiting at the gate
    DISPATCH = "dispatch"  # the way to the worker and back
    BATCH_WAIT = "batch wait"  # in the worker, for a slot or for blocks
    OWN_PREFILL = "own prefill"  # its own prompt tokens
    LONG_NEIGHBOURS = "long neighbours"  # other requests' tokens in the steps that computed its prompt
    EVICTION = "eviction"  # preempted before its first token: its blocks were given to others
    WORKER = "worker"  # ended in the worker before the first token; the worker's part is not known in detail


@dataclass(frozen=True, slots=True)
class TtftParts:
    """Where a TTFT went, in seconds. `admission_s` is a part of `gate_wait_s`; the other six add up to the TTFT."""

    tokenize_s: float
    gate_wait_s: float
    admission_s: float
    dispatch_s: float
    batch_wait_s: float
    own_prefill_s: float
    interference_s: float

    @property
    def sum_s(self) -> float:
        return (
            self.tokenize_s
            + self.gate_wait_s
            + self.dispatch_s
            + self.batch_wait_s
            + self.own_prefill_s
            + self.interference_s
        )


@dataclass(slots=True)
class _Choice:
    """One choice's tokens; times on the worker's clock."""

    first_token_s: float
    last_token_s: float
    num_tokens: int = 0


@dataclass(slots=True)
class Timeline:
    """Times are monotonic seconds, None until the milestone is reached; those of the worker come with its first output.

    The frontend sets the milestones it sees, feeds every output to `on_output`, and calls `finish` once, with the
    outcome as the client saw it. `first_byte_s` is when the first byte of the answer went to the socket. `tier` is what
    was asked for; `decision` is what the gate made of the request, with its numbers, ready for JSON.
    """

    request_id: str
    received_s: float
    tenant: str = ""
    tier: str = "default"
    num_prompt_tokens: int = 0
    tokenized_s: float | None = None
    queued_s: float | None = None
    dispatched_s: float | None = None
    prefill: PrefillTimes | None = None
    first_output_s: float | None = None
    first_byte_s: float | None = None
    finished_s: float | None = None
    outcome: str = ""
    num_preemptions: int = 0
    preempted_before_first_token: bool = False
    itl: Histogram = field(default_factory=Histogram)
    decision: dict[str, Any] = field(default_factory=dict)
    _choices: dict[int, _Choice] = field(default_factory=dict)

    # What the frontend feeds in.

    def on_output(self, output: RequestOutput, now_s: float) -> None:
        """Take in one output. Tokens that came together count as one gap and then gaps of zero."""
        if output.prefill is not None and self.prefill is None:
            self.prefill = output.prefill
            self.preempted_before_first_token = output.num_preemptions > 0
        if output.num_preemptions > self.num_preemptions:
            self.num_preemptions = output.num_preemptions
        num_tokens = len(output.token_ids)
        if num_tokens == 0:
            return
        if self.first_output_s is None:
            self.first_output_s = now_s
        choice = self._choices.get(output.index)
        if choice is None:
            choice = self._choices[output.index] = _Choice(output.time_s, output.time_s)
        else:
            self.itl.observe(output.time_s - choice.last_token_s)
        if num_tokens > 1:
            self.itl.observe(0.0, num_tokens - 1)
        choice.num_tokens += num_tokens
        choice.last_token_s = output.time_s

    def finish(self, outcome: str, now_s: float) -> None:
        """The end, whichever it was. Only the first call counts: what comes later is clean-up."""
        if self.finished_s is None:
            self.finished_s = now_s
            self.outcome = str(outcome)

    # What follows from it.

    @property
    def worker_received_s(self) -> float | None:
        return None if self.prefill is None else self.prefill.received_s

    @property
    def scheduled_s(self) -> float | None:
        return None if self.prefill is None else self.prefill.scheduled_s

    @property
    def first_token_s(self) -> float | None:
        return None if self.prefill is None else self.prefill.first_token_s

    @property
    def last_token_s(self) -> float | None:
        return max((choice.last_token_s for choice in self._choices.values()), default=None)

    @property
    def num_cached_tokens(self) -> int:
        return 0 if self.prefill is None else self.prefill.num_cached_tokens

    @property
    def num_output_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self._choices.values())

    @property
    def num_output_tokens_per_choice(self) -> list[int]:
        return [self._choices[index].num_tokens for index in sorted(self._choices)]

    @property
    def ttft_s(self) -> float | None:
        """From the first byte of the request to its first token in the frontend."""
        return None if self.first_output_s is None else self.first_output_s - self.received_s

    @property
    def tpot_s(self) -> float | None:
        """(last token - first token) / (output tokens - 1); over all choices when there are several."""
        num_gaps = sum(choice.num_tokens - 1 for choice in self._choices.values())
        if num_gaps <= 0:
            return None
        return sum(choice.last_token_s - choice.first_token_s for choice in self._choices.values()) / num_gaps

    @property
    def e2e_s(self) -> float | None:
        return None if self.finished_s is None else self.finished_s - self.received_s

    @property
    def queue_s(self) -> float | None:
        """Waiting for a place, at the gate and in the worker; for one that never got a place, until its end."""
        if self.queued_s is None:
            return None
        if self.dispatched_s is not None and self.prefill is not None:
            return self.dispatched_s - self.queued_s + self.prefill.scheduled_s - self.prefill.received_s
        return None if self.finished_s is None else self.finished_s - self.queued_s

    @property
    def prefill_s(self) -> float | None:
        """From the start of the first step that computed for it to its first token."""
        return None if self.prefill is None else self.prefill.first_token_s - self.prefill.scheduled_s

    def ttft_parts(self) -> TtftParts | None:
        """None before the first token, and for a request that did not pass every stage."""
        worker = self.prefill
        if worker is None or self.tokenized_s is None or self.dispatched_s is None or self.first_output_s is None:
            return None
        queued_s = self.tokenized_s if self.queued_s is None else self.queued_s
        return TtftParts(
            tokenize_s=self.tokenized_s - self.received_s,
            gate_wait_s=self.dispatched_s - self.tokenized_s,
            admission_s=queued_s - self.tokenized_s,
            dispatch_s=(self.first_output_s - self.dispatched_s) - (worker.first_token_s - worker.received_s),
            batch_wait_s=worker.scheduled_s - worker.received_s,
            own_prefill_s=worker.own_prefill_s,
            interference_s=worker.interference_s,
        )

    def main_cause(self, now_s: float | None = None) -> Cause:
        """The largest part of the TTFT; before (or without) a first token, of the time until the end or `now_s`."""
        parts = self.ttft_parts()
        if parts is None:
            spans = self._spans_without_token(now_s)
        else:
            neighbours = Cause.EVICTION if self.preempted_before_first_token else Cause.LONG_NEIGHBOURS
            spans = {
                Cause.TOKENIZE: parts.tokenize_s,
                Cause.ADMISSION: parts.admission_s,
                Cause.QUEUE: parts.gate_wait_s - parts.admission_s,
                Cause.DISPATCH: parts.dispatch_s,
                Cause.BATCH_WAIT: parts.batch_wait_s,
                Cause.OWN_PREFILL: parts.own_prefill_s,
                neighbours: parts.interference_s,
            }
        return max(spans, key=spans.__getitem__)

    def _spans_without_token(self, now_s: float | None) -> dict[Cause, float]:
        milestones = (self.received_s, self.tokenized_s, self.queued_s, self.dispatched_s)
        causes = (Cause.TOKENIZE, Cause.ADMISSION, Cause.QUEUE, Cause.WORKER)
        reached = [time_s for time_s in milestones if time_s is not None]
        end_s = next((time_s for time_s in (self.finished_s, now_s) if time_s is not None), reached[-1])
        spans = dict.fromkeys(causes, 0.0)
        start_s, cause = self.received_s, Cause.TOKENIZE
        for time_s, next_cause in zip(milestones[1:], causes[1:], strict=True):
            if time_s is not None:
                spans[cause] += time_s - start_s
                start_s, cause = time_s, next_cause
        spans[cause] += max(0.0, end_s - start_s)
        return spans

    def as_dict(self, now_s: float | None = None) -> dict[str, Any]:
        """Ready for JSON: milestones as seconds since `received`, what follows from them, and the main cause."""
        parts = self.ttft_parts()
        return {
            "request_id": self.request_id,
            "tenant": self.tenant,
            "tier": self.tier,
            "outcome": self.outcome or None,
            "decision": self.decision or None,
            "age_s": _rounded(None if now_s is None else now_s - self.received_s),
            "prompt_tokens": self.num_prompt_tokens,
            "cached_tokens": self.num_cached_tokens,
            "output_tokens": self.num_output_tokens,
            "output_tokens_per_choice": self.num_output_tokens_per_choice,
            "preemptions": self.num_preemptions,
            "milestones_s": {
                name: _rounded(None if time_s is None else time_s - self.received_s)
                for name, time_s in self._milestones()
            },
            "ttft_s": _rounded(self.ttft_s),
            "ttft_parts_s": None
            if parts is None
            else {
                "tokenize": _rounded(parts.tokenize_s),
                "gate_wait": _rounded(parts.gate_wait_s),
                "dispatch": _rounded(parts.dispatch_s),
                "batch_wait": _rounded(parts.batch_wait_s),
                "own_prefill": _rounded(parts.own_prefill_s),
                "interference": _rounded(parts.interference_s),
            },
            "admission_s": _rounded(None if parts is None else parts.admission_s),
            "tpot_s": _rounded(self.tpot_s),
            "itl_p50_s": _rounded(self.itl.quantile(0.5)),
            "itl_p99_s": _rounded(self.itl.quantile(0.99)),
            "itl_max_s": _rounded(self.itl.max_value if self.itl.count else None),
            "e2e_s": _rounded(self.e2e_s),
            "queue_s": _rounded(self.queue_s),
            "prefill_s": _rounded(self.prefill_s),
            "main_cause": str(self.main_cause(now_s)),
        }

    def _milestones(self) -> tuple[tuple[str, float | None], ...]:
        return (
            ("received", self.received_s),
            ("tokenized", self.tokenized_s),
            ("queued", self.queued_s),
            ("dispatched", self.dispatched_s),
            ("worker_received", self.worker_received_s),
            ("scheduled", self.scheduled_s),
            ("first_token", self.first_token_s),
            ("first_output", self.first_output_s),
            ("first_byte", self.first_byte_s),
            ("last_token", self.last_token_s),
            ("finished", self.finished_s),
        )


def _rounded(value_s: float | None) -> float | None:
    """To the microsecond, which is finer than any clock here is true."""
    return None if value_s is None else round(value_s, 6)
