"""What an engine says of itself at a step boundary: its load now, and the step that has just ended.

Owns: plain data (msgspec structs), made by the engine, carried by the wire, read by gate, admission and metrics.
Never does: arithmetic. Times are in seconds on the worker's monotonic clock; everything else is a count.
"""

from __future__ import annotations

import msgspec

AGE_BOUNDS_S = (0.1, 1.0, 10.0, 60.0, 600.0, 3600.0)
"""Upper bounds of the classes that blocks are counted in by age; one more class is open."""


class CacheLife(msgspec.Struct, array_like=True, frozen=True):
    """What became of the KV blocks of one engine since its start; see kv/pool_stats.py. Lists have one count for each
    class of AGE_BOUNDS_S."""

    policy: str
    num_evictions: int
    num_expired: int
    num_superseded: int
    hits_by_age: tuple[int, ...]
    hit_age_s: float
    freed_to_reused: tuple[int, ...]
    freed_to_reused_s: float
    num_tail_waste_tokens: int
    num_finished_blocks: int
    num_delayed_for_growth: int
    num_delayed_for_blocks: int


class LoadReport(msgspec.Struct, array_like=True, frozen=True):
    """The load of one engine at a step boundary.

    num_waiting: dispatched or preempted, not in a slot. num_waiting_tokens: prompt tokens that those, and running
    prefills, still have to compute. The step_* fields describe the step that has just been launched (0 when idle):
    its start, its composition, and with them the arrival phase of what is submitted now. `prefill_left` maps the ids of
    the requests that prefill to the tokens they will have left to compute when that step ends. num_paused: long
    answers that gave their slot to others, and go on later. max_step_s: longest that a step with a prompt in it takes
    (0: no limit).
    """

    time_s: float
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    num_context_tokens: int
    free_blocks: int
    cached_blocks: int
    held_blocks: int
    step_start_s: float
    step_prefill_tokens: int
    step_decode_rows: int
    prefill_left: dict[str, int] = {}
    cache: CacheLife | None = None
    num_paused: int = 0
    max_step_s: float = 0.0


class StepStats(msgspec.Struct, array_like=True, frozen=True):
    """A step that has ended: its composition and its times, for the metrics and the cost model.

    compute_s: from launch to the sampled ids. loop_s: the whole turn of the engine loop, schedule to emit.
    """

    step_id: int
    start_s: float
    compute_s: float
    loop_s: float
    num_prefill_tokens: int
    num_decode_rows: int
    num_context_tokens: int
    num_preemptions: int
    num_evictions: int


class LoadSnapshot(msgspec.Struct, frozen=True):
    """What admission sees of the whole service at one instant.

    num_queued: requests waiting at the gate. num_free_places: requests that workers could take right now.
    max_request_tokens: the longest prompt plus answer that some worker can hold; 0 when there is no worker.
    long_share: of the prompt tokens admitted lately, those of long prompts; 0 when nobody had to be refused.
    """

    num_queued: int
    num_free_places: int
    num_workers: int
    max_request_tokens: int
    is_draining: bool
    queued_by_tier: dict[str, int] = {}
    long_share: float = 0.0

    def num_queued_of(self, tier: str) -> int:
        return self.queued_by_tier.get(tier, 0)
