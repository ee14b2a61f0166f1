"""The ledger of KV blocks: every block is free, cached or held, at all times.

    free ──allocate──> held ──release──> free               (content not published)
                        ▲  │
                    hold│  └──publish, release──> cached ──evict──> free
                        └─────────────────────────┘

Owns: who holds how many of which block, and the free list. Never: which request holds them (the engine), or memory
(the executor). Several requests may hold one block; it leaves "held" when the last one lets go.
Invariant: num_free + num_cached + num_held == num_blocks (kv/audit.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tidegate.kv.eviction import POLICIES, PolicyName
from tidegate.kv.prefix_cache import NO_BLOCK, BlockContent, PrefixCache

AGE_BUCKETS_S = (1.0, 10.0, 60.0, 600.0)
"""Upper bounds of the classes that hits are counted in, by how long the block had been unused; the last is open."""


@dataclass(slots=True)
class PoolStats:
    """Counters since the start. Times are seconds from the last holder's end to the next allocation of the block."""

    num_evictions: int = 0
    num_expired: int = 0
    num_reused: int = 0
    freed_to_reused_s: float = 0.0
    hits_by_age: list[int] = field(default_factory=lambda: [0] * (len(AGE_BUCKETS_S) + 1))


class BlockPool:
    def __init__(self, num_blocks: int, policy: PolicyName = "lru") -> None:
        self.num_blocks = num_blocks
        self.cache = PrefixCache(POLICIES[policy]())
        self.stats = PoolStats()
        self._free = list(range(num_blocks - 1, -1, -1))
        self._num_holders = [0] * num_blocks
        self._freed_s = [0.0] * num_blocks
        self._num_held = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return self.cache.num_unheld

    @property
    def num_held(self) -> int:
        return self._num_held

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated now: free ones and cached ones."""
        return len(self._free) + self.cache.num_unheld

    def num_holders(self, block_id: int) -> int:
        return self._num_holders[block_id]

    def allocate(self, num_blocks: int, now: float) -> list[int] | None:
        """Take blocks for new content, evicting cached ones as needed. None, and nothing taken, when there are too
        few."""
        if num_blocks > self.num_available:
            return None
        taken: list[int] = []
        for _ in range(num_blocks):
            if self._free:
                block_id = self._free.pop()
            else:
                block_id = self.cache.evict()
                self.stats.num_evictions += 1
            self._num_holders[block_id] = 1
            if self._freed_s[block_id]:
                self.stats.num_reused += 1
                self.stats.freed_to_reused_s += now - self._freed_s[block_id]
            taken.append(block_id)
        self._num_held += num_blocks
        return taken

    def hold(self, block_ids: list[int], now: float, *, sharer: str, priority: int) -> None:
        """Hold published blocks (a prefix hit) one more time."""
        for block_id in block_ids:
            age_s = self.cache.use(block_id, sharer=sharer, priority=priority, now=now)
            if self._num_holders[block_id] == 0:
                self._num_held += 1
                self.stats.hits_by_age[sum(age_s > bound for bound in AGE_BUCKETS_S)] += 1
            self._num_holders[block_id] += 1

    def share(self, block_ids: list[int]) -> None:
        """Hold blocks that are held already, one more time (another choice of the same request)."""
        for block_id in block_ids:
            self._num_holders[block_id] += 1

    def publish(self, block_id: int, content: BlockContent, *, sharer: str, priority: int, now: float) -> int:
        """Make a held, computed block findable. Where another block already has this content, the holder changes over
        to that one (its id is returned) and this one is freed, so that content is kept once and chains stay whole."""
        existing = self.cache.find(content.hash)
        if existing is None:
            self.cache.insert(block_id, content, sharer=sharer, priority=priority, now=now)
            return block_id
        if existing != block_id:
            self.hold([existing], now, sharer=sharer, priority=priority)
            self.release([block_id], now)
        return existing

    def release(self, block_ids: list[int], now: float) -> None:
        """Let go of blocks once each, last one first, so that the end of a prefix is the first candidate."""
        for block_id in reversed(block_ids):
            holders = self._num_holders[block_id] - 1
            if holders < 0:
                raise RuntimeError(f"block {block_id} was released more often than held")
            self._num_holders[block_id] = holders
            if holders:
                continue
            self._num_held -= 1
            self._freed_s[block_id] = now
            if block_id in self.cache:
                self.cache.retire(block_id, now)
            else:
                self.cache.tails.remove(block_id)
                self._free.append(block_id)

    def expire(self, block_ids: list[int], now: float) -> int:
        """Free those of these published blocks that nobody holds or builds on, last one first. Returns how many."""
        num_dropped = 0
        for block_id in reversed(block_ids):
            if block_id in self.cache and self.cache.drop(block_id):
                self._free.append(block_id)
                num_dropped += 1
        self.stats.num_expired += num_dropped
        return num_dropped

    def free_block_ids(self) -> list[int]:
        """For the audit."""
        return list(self._free)


__all__ = ["AGE_BUCKETS_S", "NO_BLOCK", "BlockContent", "BlockPool", "PoolStats"]
