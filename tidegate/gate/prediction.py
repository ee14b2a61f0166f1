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
from tidegate.gate.fair_order import FairOrder
from tidegate.gate.queue import QueuedRequest, Surroundings, WaitingQueue
from tidegate.request import Request
from tidegate.scheduler.output_length import OutputLength
from tidegate.scheduler.pacing import MIN_PREFILL_TOKENS

_MAX_AHEAD = 8  # queued requests before a new one that a forecast plays through one by one
_MAX_BEHIND = 6  # and behind it, that are checked for harm


class Predictor:
    def __init__(self, config: GateConfig, step_is_paced: bool) -> None:
        self._config = config
        self._min_prefill_tokens = MIN_PREFILL_TOKENS if step_is_paced else 0
        self._residual = TtftResidual()
        self.fair: FairOrder | None = None  # set where tenants take turns
        self._lengths: defaultdict[tuple[str, str], OutputLength] = defaultdict(OutputLength)

    def reconfigure(self, config: GateConfig) -> None:
        self._config = config

    def _may_not_harm(self, request: Request, other: Request) -> bool:
        """Whether `request` has to care that `other`, which waits behind it, is served in time. Where tenants take
        turns, one that uses more than its share cannot keep others out."""
        return self.fair is None or request.tenant == other.tenant or not self.fair.borrows(other.tenant)

    def lengths_of(self, request: Request) -> OutputLength:
        return self._lengths[request.tenant, request.tier]

    def predict(
        self,
        probe: QueuedRequest,
        queue: WaitingQueue,
        views: Sequence[WorkerView],
        now: float,
    ) -> Prediction:
        """What `probe` would see at its place in the queue, on the worker that would serve it soonest."""
        around = queue.around(probe.order, _MAX_AHEAD, _MAX_BEHIND, len(views))  # each takes its share of the queue
        predictions = (self._predict_at(view, probe, around, now) for view in views)
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
        around: Surroundings,
        now: float,
    ) -> Prediction:
        request, lengths = probe.request, self.lengths_of(probe.request)
        expected = {
            max_tokens: lengths.expected_remaining(0, max_tokens)
            for max_tokens in {queued.request.max_tokens for queued in (probe, *around.ahead, *around.behind)}
        }
        ahead: list[PendingPrompt] = []
        later: list[PendingPrompt] = []
        later_requests: list[Request] = []
        for dispatched in view.pending():
            own = dispatched.request
            output = lengths.expected_remaining(0, own.max_tokens)
            prompt = PendingPrompt(view.num_prefill_left(dispatched), output, _pace_s(own))
            if dispatched.queued.place < probe.place:
                ahead.append(prompt)
            else:
                later.append(prompt)
                later_requests.append(own)
        ahead += [_pending_prompt(queued.request, expected) for queued in around.ahead]
        later += [_pending_prompt(queued.request, expected) for queued in around.behind]
        later_requests += [queued.request for queued in around.behind]
        outlook = view.outlook(
            lengths, now, precedence=2 * request.priority + probe.is_borrowing, num_joining=len(ahead) + 1
        )
        first_tokens = forecast(outlook, [*ahead, _pending_prompt(request, expected), *later])
        first_token = first_tokens[len(ahead)]
        num_ahead_tokens = sum([prompt.num_tokens for prompt in ahead])
        # The rest of the queue, at the rate of what was played through.
        extra_s = around.num_other_tokens / max(1.0, num_ahead_tokens / max(first_token.time_s, 1e-6))
        kind = self._kind(request, num_ahead_tokens > request.num_prompt_tokens or extra_s > 0.0)
        ttft_s = max(0.0, now - request.arrival_s) + self._residual.corrected(kind, first_token.time_s + extra_s)
        num_context = view.entry.load.num_context_tokens if view.entry.load else 0
        tpot_alone_s = view.cost_model.predict(0, 1, request.num_prompt_tokens)
        # On an idle worker nobody is in the way; to refuse there would also end all learning of what steps cost.
        is_alone = first_token.num_running <= 1 and not ahead and not later
        return Prediction(
            ttft_s=ttft_s,
            tpot_s=tpot_alone_s
            if is_alone
            else view.cost_model.predict(
                self._min_prefill_tokens, first_token.num_running, num_context + request.num_prompt_tokens
            ),
            tpot_alone_s=tpot_alone_s,
            harmed=sum(
                0.0
                <= other.arrival_s + other.ttft_slo_s - now
                < self._residual.corrected(self._kind(other, True), theirs.time_s + extra_s)
                for other, theirs in zip(later_requests, first_tokens[len(ahead) + 1 :], strict=True)
                if other.ttft_slo_s is not None and self._may_not_harm(request, other)
            ),
            has_place=not around.ahead and view.can_take(probe, self._config),
            expected_output=lengths.quantile_remaining(0.9, 0, request.max_tokens),
            kind=kind,
        )


def _pending_prompt(request: Request, expected: dict[int, float]) -> PendingPrompt:
    return PendingPrompt(len(request.prompt_token_ids), expected[request.max_tokens], _pace_s(request))


def _pace_s(request: Request) -> float:
    return INFINITY if request.tpot_slo_s is None else request.tpot_slo_s
