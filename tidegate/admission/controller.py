"""What to do with a request at the door, from the load as it is. Pure: the same inputs give the same decision.

    can never be served ──────────────────────────────> Reject (4xx, 503)
    the queue of its tier is full, or its objectives cannot be kept (its own TTFT and TPOT, or those of others)
        ── a downgrade of its tier makes it possible ─> Downgrade
        ── none does ─────────────────────────────────> Reject (429, with the time until it would pass)
    otherwise ──> Admit (a place is free now) or Queue

Owns: the rules. Never: the queue (gate), the prediction (forecast.py), quotas (tenancy) or which worker (routing).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from zlib import crc32

import msgspec

from tidegate.admission.decision import AdmissionDecision, Admit, Downgrade, Queue, Reject
from tidegate.admission.residual import Kind
from tidegate.config import GateConfig, TierConfig
from tidegate.metrics.load_snapshot import LoadSnapshot
from tidegate.request import Request

TTFT_MARGIN = 0.9
"""Of a TTFT objective is what a prediction may reach: predictions err to both sides."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a request would see if it were taken in now. Seconds; TTFT counts from its arrival.

    harmed: how many others that wait would miss their objective because of it. has_place: a worker takes it at once.
    expected_output: the 90th percentile of the tokens it will answer with. kind: of which correction ttft_s is.
    tpot_alone_s: what tpot_s would be on a worker with nothing else to do.
    """

    ttft_s: float
    tpot_s: float
    harmed: int = 0
    has_place: bool = True
    expected_output: float = 0.0
    kind: Kind = (False, False)
    tpot_alone_s: float = 0.0

    def numbers(self) -> dict[str, float]:
        return {
            "predicted_ttft_ms": round(self.ttft_s * 1e3, 1),
            "predicted_tpot_ms": round(self.tpot_s * 1e3, 2),
            "expected_output_p90": round(self.expected_output),
        }


Predict = Callable[[Request], Prediction]


@dataclass(frozen=True, slots=True)
class Verdict:
    """A decision; the request as it is to be served (changed by a Downgrade, else as given); and what was predicted
    for it as it is to be served (None where nothing was)."""

    decision: AdmissionDecision
    request: Request
    prediction: Prediction | None = None


def decide(
    request: Request, load: LoadSnapshot, tiers: Mapping[str, TierConfig], config: GateConfig, predict: Predict
) -> Verdict:
    """Admit, queue, downgrade or reject `request` under `load`."""
    if rejection := _impossible(request, load):
        return Verdict(rejection, request)
    if config.admission == "off":
        return Verdict(decide_by_bounds(request, load, config), request)
    prediction = predict(request)
    problem = _problem(request, load, tiers[request.tier], config, prediction)
    if problem is None:
        numbers = prediction.numbers()
        decision = Admit("fits", numbers) if prediction.has_place else Queue("work_ahead", numbers)
        return Verdict(decision, request, prediction)
    served = request
    changes: list[str] = []
    for action in tiers[request.tier].downgrade:
        served = apply_downgrade(served, action, tiers)
        changes.append(action)
        new_prediction = predict(served)
        if _problem(served, load, tiers[served.tier], config, new_prediction, is_downgraded=True) is None:
            return Verdict(Downgrade(problem, tuple(changes), new_prediction.numbers()), served, new_prediction)
    asks_no_more = request.ttft_slo_s == tiers[request.tier].ttft_slo  # than its tier promises to everybody
    if problem == "ttft_unreachable" and asks_no_more and _only_its_own_length(load, prediction):
        return Verdict(Admit("own_length", prediction.numbers()), request, prediction)
    return Verdict(_rejection(request, load, problem, prediction), request, prediction)


def apply_downgrade(request: Request, action: str, tiers: Mapping[str, TierConfig]) -> Request:
    """`request` after one of its tier's downgrades: clamp:N or tier:NAME."""
    kind, _, value = action.partition(":")
    if kind == "clamp":
        return msgspec.structs.replace(request, max_tokens=min(request.max_tokens, int(value)))
    tier = tiers[value]
    return msgspec.structs.replace(
        request, tier=value, priority=tier.rank, ttft_slo_s=tier.ttft_slo, tpot_slo_s=tier.tpot_slo
    )


def _impossible(request: Request, load: LoadSnapshot) -> Reject | None:
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
    return None


def decide_by_bounds(request: Request, load: LoadSnapshot, config: GateConfig) -> AdmissionDecision:
    """What is done without predictions: the bound of the queue, and what can never be served."""
    if rejection := _impossible(request, load):
        return rejection
    if load.num_free_places > load.num_queued:
        return Admit("fits")
    if load.num_queued >= config.max_queued:
        return _queue_full(load.num_queued, config.max_queued, None)
    return Queue("no_free_place")


def _problem(
    request: Request,
    load: LoadSnapshot,
    tier: TierConfig,
    config: GateConfig,
    prediction: Prediction,
    *,
    is_downgraded: bool = False,
) -> str | None:
    """Why the request cannot be served as it is; None when it can. Named as the API names it."""
    if not prediction.has_place and (
        load.num_queued >= config.max_queued or load.num_queued_of(request.tier) >= tier.max_queued
    ):
        return "queue_full"
    if request.ttft_slo_s is not None and prediction.ttft_s > TTFT_MARGIN * request.ttft_slo_s:
        return "ttft_unreachable"
    # An objective that the machine cannot keep with nothing else to do is no reason to refuse: it never could.
    if request.tpot_slo_s is not None and prediction.tpot_alone_s <= request.tpot_slo_s < prediction.tpot_s:
        return "tpot_unreachable"
    if prediction.harmed:
        return "others_ttft"
    if load.long_share > config.max_long_share and request.num_prompt_tokens >= config.long_prompt:
        return "long_share"
    if not is_downgraded and tier.downgrade:
        if tier.max_prompt_tokens is not None and request.num_prompt_tokens > tier.max_prompt_tokens:
            return "long_prompt"
        if tier.max_expected_output is not None and prediction.expected_output > tier.max_expected_output:
            return "long_output"
    return None


def _only_its_own_length(load: LoadSnapshot, prediction: Prediction) -> bool:
    """Whether nothing but its own prompt keeps a request from its objective, while nobody else has to be refused. A
    late answer is then better than none: to come back would change nothing."""
    _, has_work_ahead = prediction.kind
    is_quiet = load.num_queued == 0 and load.long_share == 0.0
    return is_quiet and prediction.has_place and not has_work_ahead and not prediction.harmed


def _rejection(request: Request, load: LoadSnapshot, problem: str, prediction: Prediction) -> AdmissionDecision:
    if problem in ("long_prompt", "long_output"):  # wishes of the operator, no reason to refuse
        return Queue(problem, prediction.numbers())
    numbers = prediction.numbers()
    retry_after_s = _jittered(max(1.0, prediction.ttft_s - (request.ttft_slo_s or 0.0)), request.request_id)
    if problem == "queue_full":
        return Reject(problem, f"{load.num_queued} requests are waiting, which is the limit", retry_after_s, numbers)
    if problem == "tpot_unreachable":
        message = (
            f"tokens would come every {prediction.tpot_s * 1e3:.0f} ms, "
            f"the objective is {(request.tpot_slo_s or 0.0) * 1e3:.0f} ms"
        )
    elif problem == "long_share":
        message = f"long prompts have {load.long_share:.0%} of the prompt tokens now, and others have to be refused"
    elif problem == "others_ttft":
        message = f"{prediction.harmed} requests that wait already would get their first token too late"
    else:
        message = (
            f"the first token would come after {prediction.ttft_s:.2f} s, the objective is {request.ttft_slo_s:g} s"
        )
    return Reject(problem, message, retry_after_s, numbers)


def _queue_full(num_queued: int, limit: int, retry_after_s: float | None) -> Reject:
    return Reject("queue_full", f"{num_queued} requests are waiting, the limit is {limit}", retry_after_s)


def _jittered(seconds: float, request_id: str) -> float:
    """Spread over +-25%, so that refused clients do not all come back at once; the same for the same request."""
    return seconds * (0.75 + 0.5 * (crc32(request_id.encode()) % 1024) / 1024)
