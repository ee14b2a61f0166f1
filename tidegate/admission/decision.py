"""AdmissionDecision = Admit | Queue | Downgrade | Reject: what is done with a request at the door, and why.

Plain data. Each carries a reason code and the numbers it rests on, for the log, the metrics and the client.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Admit:
    """A worker can take it now."""

    reason: str
    numbers: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Queue:
    """It waits at the gate."""

    reason: str
    numbers: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Downgrade:
    """It is served with less than was asked for; `changes` names what, in the form the client is told."""

    reason: str
    changes: tuple[str, ...]
    numbers: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reject:
    """It ends here. `reason` is a row of the API's error table; `message` is one sentence with the numbers."""

    reason: str
    message: str
    retry_after_s: float | None = None
    numbers: dict[str, float] = field(default_factory=dict)


AdmissionDecision = Admit | Queue | Downgrade | Reject
