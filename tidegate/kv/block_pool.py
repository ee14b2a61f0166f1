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

from tidegate.kv.eviction import PolicyName, make_policy
from tidegate.kv.pool_stats import PoolStats
from tidegate.kv.prefix_cache import NO_BLOCK, BlockContent, PrefixCache
from tidegate.kv.sessions import BlockUser

_NEVER = -1.0
_MAX_EXPIRED = 2048  # blocks a step; what is due beyond that goes in the next one


class BlockPool:
    def __init__(self, num_blocks: int, policy: PolicyName = "lru") -> None:
        self.num_blocks = num_blocks
        self.policy = policy
        self.cache = PrefixCache(make_policy(policy, num_blocks))
        self.stats = PoolStats()
        self._free = list(range(num_blocks - 1, -1, -1))
        self._num_holders = [0] * num_blocks
        self._freed_s = [_NEVER] * num_blocks
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
            if self._freed_s[block_id] != _NEVER:
                self.stats.reused(now - self._freed_s[block_id])
            taken.append(block_id)
        self._num_held += num_blocks
        return taken

    def hold(self, block_ids: list[int], user: BlockUser, now: float, *, is_replay: bool = False) -> None:
        """Hold published blocks (a prefix hit) one more time. What a replay finds again is no hit."""
        for block_id in block_ids:
            age_s = self._hold(block_id, user, now)
            if not is_replay:
                self.stats.hit(age_s)

    def _hold(self, block_id: int, user: BlockUser, now: float) -> float:
        age_s = self.cache.use(block_id, user, now)
        self._num_held += self._num_holders[block_id] == 0
        self._num_holders[block_id] += 1
        return age_s

    def share(self, block_ids: list[int]) -> None:
        """Hold blocks that are held already, one more time (another choice of the same request)."""
        for block_id in block_ids:
            self._num_holders[block_id] += 1

    def publish(self, block_id: int, content: BlockContent, user: BlockUser, now: float) -> int:
        """Make a held, computed block findable. Where another block already has this content, the holder changes over
        to that one (its id is returned) and this one is freed, so that content is kept once and chains stay whole."""
        existing = self.cache.find(content.hash)
        if existing is None:
            superseded = self.cache.insert(block_id, content, user, now)
            self.stats.num_superseded += len(superseded)
            self._free += superseded
            return block_id
        if existing != block_id:
            self._hold(existing, user, now)
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

    def expire_sessions(self, now: float) -> None:
        """Free what belongs to conversations alone that have been silent for their time to live."""
        num_expired = 0
        while num_expired < _MAX_EXPIRED and (due := self.cache.sessions.take_due(now)):
            for block_id in reversed(due):
                if self.cache.drop(block_id):
                    self._free.append(block_id)
                    num_expired += 1
        self.stats.num_expired += num_expired

    def free_block_ids(self) -> list[int]:
        """For the audit."""
        return list(self._free)


__all__ = ["NO_BLOCK", "BlockContent", "BlockPool", "BlockUser", "PoolStats"]
