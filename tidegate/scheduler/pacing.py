"""How much prefill a step may take along without a running answer falling behind its TPOT objective.

An answer whose first token came at f keeps its objective T if its token n + 1 is there by f + n x T. So a step that
brings token n + 1 to every running answer may last until the earliest of those times; what its decodes do not need of
that is for prefill. Answers that are ahead of their pace so pay for the prefill of others, and no more than they can.

Prefill keeps a floor, so that a batch that cannot keep its pace any more (or has no slack at all) still takes in
prompts: their waiting would cost more than the pace.
"""

from __future__ import annotations

from collections.abc import Iterable

from tidegate.cost_model import CostModel
from tidegate.scheduler.state import RequestState

MARGIN = 0.95  # of an objective is what is aimed at: steps are predicted, not known
MIN_PREFILL_TOKENS = 16
UNLIMITED = 1 << 30


class StepPacing:
    def __init__(self, cost_model: CostModel) -> None:
        self._cost_model = cost_model

    def prefill_tokens(self, decodes: Iterable[RequestState], num_context_tokens: int, now: float) -> int:
        """Most prompt tokens that a step started now may compute beside a token for each of `decodes`."""
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
        if end_s == float("inf"):
            return UNLIMITED
        left_s = end_s - now - self._cost_model.predict(0, num_rows, num_context_tokens)
        return max(MIN_PREFILL_TOKENS, int(left_s / max(self._cost_model.cost.prefill_token_s, 1e-9)))
