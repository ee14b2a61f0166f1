"""Outcome: what became of one WorkItem, as its client saw it. Plain data, from a real server or from the simulator.

Times are seconds from the start of the run. `arrival_s` is when the request was due, not when the client got round to
sending it: whatever delays the client delays the user too (coordinated omission is not hidden). `last_attempt_s` is set
when a retry was sent. `is_thinned`: of token_times only the first and the last were kept, to save memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from tidegate.bench.workload import WorkItem


class Ending(StrEnum):
    """How a request ended for its client."""

    COMPLETE = "complete"  # all that was wanted: the whole answer, or up to where the client hangs up
    SHORT = "short"  # an answer, with fewer tokens than wanted
    REFUSED = "refused"  # 429
    UNAVAILABLE = "unavailable"  # 503 and other answers of a server that does not serve
    INVALID = "invalid"  # any other 4xx
    FAILED = "failed"  # broken off, no answer, no connection
    UNSENT = "unsent"  # a later turn of a conversation that ended early


@dataclass(slots=True)
class Outcome:
    item: WorkItem
    ending: Ending
    arrival_s: float
    ended_s: float
    answered_s: float = 0.0
    token_times: Sequence[float] = ()
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    served_tier: str = ""
    is_downgraded: bool = False
    code: str = ""
    num_attempts: int = 1
    last_attempt_s: float | None = None
    send_lag_s: float = 0.0
    predicted_ttft_s: float | None = None
    is_thinned: bool = False

    @property
    def ttft_s(self) -> float | None:
        return self.token_times[0] - self.arrival_s if self.token_times else None

    @property
    def tpot_s(self) -> float | None:
        """(last token - first token) / (output tokens - 1)."""
        if self.num_output_tokens < 2 or not self.token_times:
            return None
        return (self.token_times[-1] - self.token_times[0]) / (self.num_output_tokens - 1)

    @property
    def e2e_s(self) -> float:
        return self.ended_s - self.arrival_s

    @property
    def time_to_refuse_s(self) -> float | None:
        """Of the last attempt: the pauses between retries are the client's own."""
        if self.ending is not Ending.REFUSED:
            return None
        return self.ended_s - (self.arrival_s if self.last_attempt_s is None else self.last_attempt_s)
