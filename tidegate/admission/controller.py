"""What to do with a request at the door, from the load as it is. Pure: the same inputs give the same decision.

Owns: the rules. Never: the queue itself (gate), quotas (tenancy), or which worker (routing).
"""

from __future__ import annotations

from tidegate.admission.decision import AdmissionDecision, Admit, Queue, Reject
from tidegate.config import GateConfig
from tidegate.metrics.load_snapshot import LoadSnapshot
from tidegate.request import Request


def decide(request: Request, load: LoadSnapshot, config: GateConfig) -> AdmissionDecision:
    """Admit, queue or reject `request` under `load`."""
    if load.is_draining:
        return Reject("draining", "the server is shutting down and takes no new requests")
    if load.num_workers == 0:
        return Reject("no_workers", "no worker is ready to serve this model")
    total = request.max_total_tokens
    if total > load.max_request_tokens:
        return Reject(
            "never_fits",
            f"prompt ({request.num_prompt_tokens} tokens) plus max_tokens ({request.max_tokens}) is {total} tokens; "
            f"the most that any worker can hold is {load.max_request_tokens}",
        )
    numbers = {"num_queued": float(load.num_queued), "num_free_places": float(load.num_free_places)}
    if load.num_free_places > load.num_queued:
        return Admit("fits_now", numbers)
    if load.num_queued >= config.max_queued:
        return Reject(
            "queue_full", f"{load.num_queued} requests are waiting, the limit is {config.max_queued}", numbers=numbers
        )
    return Queue("no_free_place", numbers)
