"""What a step that has ended says of itself, for the report that every shell sends.

Owns: what the counters of scheduler and pool stood at after the step before. Never: a clock; the shell gives the times.
"""

from __future__ import annotations

from tidegate.engine.engine import Engine
from tidegate.metrics.load_snapshot import StepStats
from tidegate.scheduler.step import StepPlan


class StepStatsSource:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._num_preemptions = 0
        self._num_evictions = 0

    def of(self, plan: StepPlan, *, start_s: float, compute_s: float, loop_s: float) -> StepStats:
        """The step of `plan`, once it has been applied. Preemptions and evictions are those since the step before."""
        preemptions, evictions = self._engine.scheduler.stats.num_preemptions, self._engine.pool.stats.num_evictions
        stats = StepStats(
            step_id=plan.step_id,
            start_s=start_s,
            compute_s=compute_s,
            loop_s=loop_s,
            num_prefill_tokens=plan.num_prefill_tokens,
            num_decode_rows=plan.num_decode_rows,
            num_context_tokens=plan.num_context_tokens,
            num_preemptions=preemptions - self._num_preemptions,
            num_evictions=evictions - self._num_evictions,
        )
        self._num_preemptions, self._num_evictions = preemptions, evictions
        return stats
