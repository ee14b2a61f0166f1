"""What the gate asks its shell to do. The gate itself does no I/O: each of its verbs returns a list of these."""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.request import Request, RequestOutput


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


GateEffect = Dispatch | CancelAtWorker | Deliver | Refuse
