"""What the gate asks its shell to do. The gate itself does no I/O: each of its verbs returns a list of these."""

from __future__ import annotations

from dataclasses import dataclass, field

from tidegate.admission.decision import AdmissionDecision
from tidegate.request import Request, RequestOutput


@dataclass(frozen=True, slots=True)
class Decided:
    """What admission has decided of a request, and how it is served (tier, max_tokens, objectives). Comes before any
    other effect of the request; again when a request that waits is downgraded. Not for a refusal. Where admission only
    observes, the decision (a Reject too) is what would have been done, and the request is served as it came."""

    request: Request
    decision: AdmissionDecision


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Send the request to the worker."""

    worker_id: str
    request: Request


@dataclass(frozen=True, slots=True)
class CancelAtWorker:
    worker_id: str
    request_id: str


@dataclass(frozen=True, slots=True)
class Deliver:
    """Hand what the worker produced to the request's stream. After an output that ends its last choice nothing more
    comes for that request."""

    request_id: str
    outputs: list[RequestOutput]


@dataclass(frozen=True, slots=True)
class Refuse:
    """The request ends without an answer. `outcome` is a row of the API's error table."""

    request_id: str
    outcome: str
    message: str
    retry_after_s: float | None = None
    numbers: dict[str, float] = field(default_factory=dict)


GateEffect = Decided | Dispatch | CancelAtWorker | Deliver | Refuse
