"""How much prefill a step may take along without a running answer falling behind its TPOT objective.

An answer whose first token came at f keeps its objective T if its token n + 1 is there by f + n x T. So a step that
brings token n + 1 to every running answer may last until the earliest of those times; what its decodes do not need of
that is for prefill. Answers that are ahead of their pace so pay for the prefill of others, and no more than they can.

A request that comes while a step runs waits for its end. So no step takes longer than a part of the tightest TTFT
objective that was asked for lately: a long prompt is computed in pieces that leave the others' first tokens in time.

Prefill keeps a floor, so that a batch that cannot keep its pace any more (or has no slack at all) still takes in
prompts: their waiting would cost more than the pace.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from tidegate.cost_model import CostModel
from tidegate.scheduler.state import RequestState

MARGIN = 0.95  # of an objective is what is aimed at: steps are predicted, not known
MIN_PREFILL_TOKENS = 16
TTFT_PART = 0.25
"""Of the tightest TTFT objective is what a step may take: the rest is for what a request has to compute itself."""
_MIN_BASES = 5.0  # of a step's fixed cost is what it may take at least: short steps waste it
_HURRY = 2.5  # times the time that a long prompt's rest takes alone is when it needs all it can get
_RECENT_S = 60.0
_MAX_OBJECTIVES = 64
UNLIMITED = 1 << 30


class PrefillBudget(NamedTuple):
    """Most prompt tokens in a step, and most of them for long prompts, which leave the lead that answers have gained to
    the prompts that come meanwhile."""

    num_tokens: int
    num_long_tokens: int


class StepPacing:
    def __init__(self, cost_model: CostModel) -> None:
        self._cost_model = cost_model
        self._asked_s: dict[float, float] = {}  # TTFT objective: when it was last asked for

    def asked(self, ttft_slo_s: float | None, now: float) -> None:
        """A request with this objective has come."""
        if ttft_slo_s is None:
            return
        self._asked_s[ttft_slo_s] = now
        if len(self._asked_s) > _MAX_OBJECTIVES:
            self._asked_s = {slo_s: at for slo_s, at in self._asked_s.items() if at >= now - _RECENT_S}
        if len(self._asked_s) > _MAX_OBJECTIVES:
            del self._asked_s[max(self._asked_s)]

    def max_step_s(self, now: float) -> float:
        """Longest that a step with a prompt in it should take."""
        recent = [slo_s for slo_s, at in self._asked_s.items() if at >= now - _RECENT_S]
        return max(TTFT_PART * min(recent, default=float("inf")), _MIN_BASES * self._cost_model.cost.base_s)

    def prefill_tokens(self, decodes: Iterable[RequestState], num_context_tokens: int, now: float) -> PrefillBudget:
        """What a step started now may compute of prompts beside a token for each of `decodes`."""
        max_step_s = self.max_step_s(now)
        end_s = float("inf")
        num_rows = 0
        for state in decodes:
            num_rows += 1
            if state.tpot_slo_s is not None:
                due_s = state.first_token_s + MARGIN * state.tpot_slo_s * (
                    len(state.token_ids) - state.num_prompt_tokens
                )
                if due_s < end_s:
                    end_s = due_s
        decodes_s = self._cost_model.predict(0, num_rows, num_context_tokens)
        reserve_s = max_step_s if max_step_s < float("inf") else 0.0
        return PrefillBudget(
            self._num_tokens(min(end_s, now + max_step_s) - now - decodes_s),
            self._num_tokens(min(end_s - reserve_s, now + max_step_s) - now - decodes_s),
        )

    def can_wait(self, state: RequestState, now: float) -> bool:
        """Whether a long prompt is in time even if it gets less than half of the machine from now on."""
        slo_s = state.request.ttft_slo_s
        if slo_s is None:
            return True
        return state.received_s + slo_s - now > _HURRY * state.num_uncomputed * self._cost_model.cost.prefill_token_s

    def _num_tokens(self, left_s: float) -> int:
        if left_s == float("inf"):
            return UNLIMITED
        return max(MIN_PREFILL_TOKENS, int(left_s / max(self._cost_model.cost.prefill_token_s, 1e-9)))
