"""Which cached block goes first when room is needed: one sort key a policy, lowest first.

Only blocks that nobody holds and that have no cached child are candidates, so a prefix is always given up from its
end. A key is computed when a block becomes a candidate and stands until the block is used again; where a policy lets
value fade with time, it does so by raising what newcomers get (the inflation of GreedyDual), which orders the same.

A new policy: a class with `key`, and a row in POLICIES.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

PolicyName = Literal["lru", "lfu", "cost-aware"]


@dataclass(slots=True)
class CachedBlock:
    """What a policy may know of a published block.

    depth: how many blocks lie before it in its prefix. num_uses: times it was computed or hit. last_used_s: when its
    last holder let go. num_sharers: how many different conversations (sessions, or requests without one) used it.
    priority: the most urgent tier rank that used it (lower is more urgent).
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


class EvictionPolicy(Protocol):
    def key(self, block: CachedBlock) -> tuple[float, ...]:
        """Lower goes first."""
        ...

    def evicted(self, key: tuple[float, ...]) -> None:
        """Told the key of each block that was given up for room."""
        ...


class LeastRecentlyUsed:
    def key(self, block: CachedBlock) -> tuple[float, ...]:
        return (block.last_used_s, -block.depth)

    def evicted(self, key: tuple[float, ...]) -> None:
        pass


class LeastFrequentlyUsed:
    def key(self, block: CachedBlock) -> tuple[float, ...]:
        return (block.num_uses, block.last_used_s, -block.depth)

    def evicted(self, key: tuple[float, ...]) -> None:
        pass


class CostAware:
    """GreedyDual-Size-Frequency (Cherkasova 1998) with a block's cost and reuse as a language model has them.

    value = inflation + recompute cost x expected reuse. Recompute cost grows with depth, because attention reads all
    that lies before. Expected reuse: uses beyond the first, weighed by how many different conversations they came
    from, so that a hot shared prefix stays while the one-off tail of an idle conversation goes; less for each tier
    below the most urgent. The inflation is the value of the last block given up: what was not used since then sinks
    below what comes in now.
    """

    depth_cost = 0.01  # one block of context adds about 1% to the cost of computing a block
    sharer_weight = 2.0
    tier_discount = 0.5

    def __init__(self) -> None:
        self._inflation = 0.0

    def key(self, block: CachedBlock) -> tuple[float, ...]:
        cost = 1.0 + self.depth_cost * block.depth
        reuse = block.num_uses + self.sharer_weight * (block.num_sharers - 1)
        value = cost * reuse * self.tier_discount ** max(0, block.priority)
        return (self._inflation + value, block.last_used_s, -block.depth)

    def evicted(self, key: tuple[float, ...]) -> None:
        self._inflation = max(self._inflation, key[0])


POLICIES: dict[PolicyName, type[EvictionPolicy]] = {
    "lru": LeastRecentlyUsed,
    "lfu": LeastFrequentlyUsed,
    "cost-aware": CostAware,
}
