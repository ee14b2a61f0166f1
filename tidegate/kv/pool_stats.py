"""What became of the blocks: counters since the start, and their growth since they were last asked for.

Owns: the arithmetic only; the pool and the scheduler count. Times are in seconds, ages in the classes of AGE_BOUNDS_S.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Literal

from tidegate.metrics.load_snapshot import AGE_BOUNDS_S, CacheLife

EvictionReason = Literal["room", "expired", "superseded"]


def _ages() -> list[int]:
    return [0] * (len(AGE_BOUNDS_S) + 1)


@dataclass(slots=True)
class PoolStats:
    """num_evictions: cached blocks given up because their room was needed. num_expired: because their session's time
    was up. num_superseded: because a longer block holds all that they held. hits_by_age: blocks that were hit, by how
    long nobody had held them (those in use are in the first class). freed_to_reused: blocks allocated, by how long
    they had been without a holder."""

    num_evictions: int = 0
    num_expired: int = 0
    num_superseded: int = 0
    hits_by_age: list[int] = field(default_factory=_ages)
    hit_age_s: float = 0.0
    freed_to_reused: list[int] = field(default_factory=_ages)
    freed_to_reused_s: float = 0.0
    num_tail_waste_tokens: int = 0
    num_finished_blocks: int = 0
    num_delayed_for_growth: int = 0
    num_delayed_for_blocks: int = 0

    def hit(self, age_s: float) -> None:
        self.hits_by_age[bisect_left(AGE_BOUNDS_S, age_s)] += 1
        self.hit_age_s += age_s

    def reused(self, age_s: float) -> None:
        self.freed_to_reused[bisect_left(AGE_BOUNDS_S, age_s)] += 1
        self.freed_to_reused_s += age_s

    def life(self, policy: str) -> CacheLife:
        """The counters as plain data for the wire."""
        return CacheLife(
            policy=policy,
            num_evictions=self.num_evictions,
            num_expired=self.num_expired,
            num_superseded=self.num_superseded,
            hits_by_age=tuple(self.hits_by_age),
            hit_age_s=self.hit_age_s,
            freed_to_reused=tuple(self.freed_to_reused),
            freed_to_reused_s=self.freed_to_reused_s,
            num_tail_waste_tokens=self.num_tail_waste_tokens,
            num_finished_blocks=self.num_finished_blocks,
            num_delayed_for_growth=self.num_delayed_for_growth,
            num_delayed_for_blocks=self.num_delayed_for_blocks,
        )
