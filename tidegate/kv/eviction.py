"""Which cached block goes first when room is needed: one sort key a policy, lowest first.

Only blocks that nobody holds and that have no cached child are candidates, so a prefix is always given up from its
end. A key is computed when a block becomes a candidate and stands until the block is used again, so it may depend on
the time of the last use, and not on how long ago that was.

A new policy: a class with `key`, and a line in make_policy.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2
from typing import Literal, Protocol

PolicyName = Literal["lru", "lfu", "cost-aware"]


@dataclass(slots=True)
class CachedBlock:
    """What a policy may know of a published block.

    depth: how many blocks lie before it in its prefix. num_uses: times it was computed or hit. last_used_s: when its
    last holder let go. num_sharers: how many different conversations (sessions, or requests without one) used it.
    priority: the most urgent tier rank that used it (lower is more urgent). mark: the policy's own time at last_used_s.
    tenant: whose request computed it.
    """

    hash: bytes
    parent_id: int
    depth: int
    num_uses: int
    num_children: int
    last_used_s: float
    num_sharers: int
    last_sharer: str
    priority: int
    mark: float = 0.0
    tenant: str = ""


class EvictionPolicy(Protocol):
    def mark(self) -> float:
        """The policy's own time, kept with a block when its last holder lets go."""
        ...

    def key(self, block: CachedBlock) -> tuple[float, ...]:
        """Lower goes first."""
        ...

    def evicted(self, key: tuple[float, ...]) -> None:
        """Told the key of each block that was given up for room."""
        ...


class LeastRecentlyUsed:
    def mark(self) -> float:
        return 0.0

    def key(self, block: CachedBlock) -> tuple[float, ...]:
        return (block.last_used_s, -block.depth)

    def evicted(self, key: tuple[float, ...]) -> None:
        pass


class LeastFrequentlyUsed:
    def mark(self) -> float:
        return 0.0

    def key(self, block: CachedBlock) -> tuple[float, ...]:
        return (block.num_uses, block.last_used_s, -block.depth)

    def evicted(self, key: tuple[float, ...]) -> None:
        pass


class CostAware:
    """Least recently used, with a head start for what is worth more.

    The policy's time is the number of blocks given up so far; in a turnover, num_blocks of them, a block that is used
    no more goes from newest to oldest. A block's head start, in turnovers, is recompute cost x expected reuse: the cost
    grows with depth, because attention reads all that lies before, and reuse is told by how many different
    conversations have used it (log2: the first tell most), up to a limit. So a hot shared prefix outlasts a stream of
    one-off prompts and idle conversations, but goes in time when nobody uses it any more. Lower tiers' blocks start
    behind.

    Why not GreedyDual-Size-Frequency, which counts uses: see docs/decisions/eviction.md.
    """

    depth_cost = 0.01  # a 32-token block of context adds about 1% to the time of computing a block
    sharer_turnovers = 0.5
    max_turnovers = 2.0
    tier_turnovers = 0.5

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._num_evicted = 0

    def mark(self) -> float:
        return self._num_evicted

    def key(self, block: CachedBlock) -> tuple[float, ...]:
        cost = 1.0 + self.depth_cost * block.depth
        turnovers = min(self.max_turnovers, self.sharer_turnovers * cost * log2(block.num_sharers))
        turnovers -= self.tier_turnovers * max(0, block.priority)
        return (block.mark + self._num_blocks * turnovers, block.last_used_s, -block.depth)

    def evicted(self, key: tuple[float, ...]) -> None:
        self._num_evicted += 1


def make_policy(name: PolicyName, num_blocks: int) -> EvictionPolicy:
    """`num_blocks` is the size of the pool."""
    if name == "lru":
        return LeastRecentlyUsed()
    return LeastFrequentlyUsed() if name == "lfu" else CostAware(num_blocks)
