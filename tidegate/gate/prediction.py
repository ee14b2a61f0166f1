"""From what the gate knows of queue and workers to what a request would see: the forecast's input, and its correction.

Owns: learned answer lengths, and what predictions of TTFT have been wrong by. Never: decisions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from tidegate.admission.controller import Prediction
from tidegate.admission.forecast import INFINITY, PendingPrompt, forecast
from tidegate.admission.residual import Kind, TtftResidual
from tidegate.config import GateConfig
from tidegate.gate.dispatched import WorkerView
from tidegate.gate.queue import QueuedRequest
from tidegate.request import Request
from tidegate.scheduler.output_length import OutputLength
from tidegate.scheduler.pacing import MIN_PREFILL_TOKENS

MAX_AHEAD = 64  # queued requests before a new one that a forecast plays through one by one
_MAX_BEHIND = 16  # and behind it, that are checked for harm


class Predictor:
    def __init__(self, config: GateConfig, step_is_paced: bool) -> None:
        self._config = config
        self._min_prefill_tokens = MIN_PREFILL_TOKENS if step_is_paced else 0
        self._residual = TtftResidual()
        self._lengths: defaultdict[tuple[str, str], OutputLength] = defaultdict(OutputLength)

    def reconfigure(self, config: GateConfig) -> None:
        self._config = config

    def lengths_of(self, request: Request) -> OutputLength:
        return self._lengths[request.tenant, request.tier]

    def predict(
        self,
        probe: QueuedRequest,
        before: Sequence[QueuedRequest],
        behind: Sequence[QueuedRequest],
        views: Sequence[WorkerView],
        now: float,
    ) -> Prediction:
        """What `probe` would see at its place in the queue, on the worker that would serve it soonest."""
        if len(views) > 1:  # each takes its share of the queue
            before, behind = before[:: len(views)], behind[:: len(views)]
        predictions = (self._predict_at(view, probe, before, behind, now) for view in views)
        return min(predictions, key=lambda prediction: prediction.ttft_s)

    def judge(self, queued: QueuedRequest, now: float) -> None:
        """A request whose prediction was frozen when it came has its first token: learn from it."""
        if queued.prediction is not None:
            actual_s = now - queued.request.arrival_s
            self._residual.observe(queued.prediction.kind, queued.prediction.ttft_s, actual_s)

    def _kind(self, request: Request, has_work_ahead: bool) -> Kind:
        return request.num_prompt_tokens >= self._config.long_prompt, has_work_ahead

    def _predict_at(
        self,
        view: WorkerView,
        probe: QueuedRequest,
        before: Sequence[QueuedRequest],
        behind: Sequence[QueuedRequest],
        now: float,
    ) -> Prediction:
        request, lengths = probe.request, self.lengths_of(probe.request)
        ahead: list[PendingPrompt] = []
        later: list[PendingPrompt] = []
        later_requests: list[Request] = []
        for dispatched in view.pending():
            prompt = _pending_prompt(dispatched.request, lengths, view.num_prefill_left(dispatched))
            if dispatched.queued.order < probe.order:
                ahead.append(prompt)
            else:
                later.append(prompt)
                later_requests.append(dispatched.request)
        ahead += [_pending_prompt(queued.request, lengths) for queued in before[:MAX_AHEAD]]
        later += [_pending_prompt(queued.request, lengths) for queued in behind[:_MAX_BEHIND]]
        later_requests += [queued.request for queued in behind[:_MAX_BEHIND]]
        own_prompt = _pending_prompt(request, lengths)
        first_tokens = forecast(view.outlook(lengths, now), [*ahead, own_prompt, *later])
        own = first_tokens[len(ahead)]
        num_ahead_tokens = sum(prompt.num_tokens for prompt in ahead)
        extra_s = 0.0
        if len(before) > MAX_AHEAD:  # the rest of the queue, at the rate of what was played through
            rate = max(1.0, num_ahead_tokens / max(own.time_s, 1e-6))
            extra_s = sum(queued.request.num_prompt_tokens for queued in before[MAX_AHEAD:]) / rate
        kind = self._kind(request, num_ahead_tokens > request.num_prompt_tokens or extra_s > 0.0)
        ttft_s = max(0.0, now - request.arrival_s) + self._residual.corrected(kind, own.time_s + extra_s)
        num_context = view.entry.load.num_context_tokens if view.entry.load else 0
        return Prediction(
            ttft_s=ttft_s,
            tpot_s=view.cost_model.predict(
                self._min_prefill_tokens, own.num_running, num_context + request.num_prompt_tokens
            ),
            harmed=sum(
                0.0
                <= other.arrival_s + other.ttft_slo_s - now
                < self._residual.corrected(self._kind(other, True), first_token.time_s + extra_s)
                for other, first_token in zip(later_requests, first_tokens[len(ahead) + 1 :], strict=True)
                if other.ttft_slo_s is not None
            ),
            has_place=not before and view.can_take(probe, self._config),
            expected_output=lengths.quantile_remaining(0.9, 0, request.max_tokens),
            kind=kind,
        )


def _pending_prompt(request: Request, lengths: OutputLength, num_left: int | None = None) -> PendingPrompt:
    return PendingPrompt(
        request.num_prompt_tokens if num_left is None else num_left,
        lengths.expected_remaining(0, request.max_tokens),
        INFINITY if request.tpot_slo_s is None else request.tpot_slo_s,
    )
