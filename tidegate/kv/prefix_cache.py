"""Which block holds which content, and in which order unheld ones are given up.

Owns: the table from block hash to block id, and the candidates for eviction. Never: free lists or holders (BlockPool).
Full blocks are shared. The start of a block that goes on differently, or of the last, partial block of a prefix, is
found by its tokens (kv/tails.py) and copied, so that hits are as fine as tokens.

The published blocks form a forest: a block's parent is the one before it in its prefix. Whoever holds a block holds
its parents too, so an unheld block has unheld children only, and giving up unheld leaves first reaches every unheld
block without ever leaving an orphan.

         system prompt        [a]──[b]──[c]            held by nobody, children: d, f
         two conversations           └──[d]──[e]       e: a leaf, candidate
                                     └──[f]            f: a leaf, candidate; c follows once both are gone
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from tidegate.kv.cache_shares import CacheShares
from tidegate.kv.eviction import CachedBlock, EvictionPolicy
from tidegate.kv.sessions import BlockUser, Sessions
from tidegate.kv.tails import TailIndex

NO_BLOCK = -1


@dataclass(frozen=True, slots=True)
class BlockContent:
    """What a computed block holds: its hash, the block before it in its prefix, and its tokens (fewer than a block
    has room for in the last one of a prefix)."""

    hash: bytes
    parent_hash: bytes
    parent_id: int
    token_ids: list[int]


class PrefixCache:
    def __init__(self, policy: EvictionPolicy) -> None:
        self.tails = TailIndex()
        self.sessions = Sessions()
        self._policy = policy
        self._block_of: dict[bytes, int] = {}
        self._cached: dict[int, CachedBlock] = {}
        self._unheld: set[int] = set()
        # Lazily cleaned heap: an entry counts only while its stamp is the block's current one.
        self._candidates: list[tuple[tuple[float, ...], int, int]] = []
        self._stamp: dict[int, int] = {}
        self._next_stamp = 0
        self._shares = CacheShares()

    def __len__(self) -> int:
        return len(self._cached)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._cached

    @property
    def num_unheld(self) -> int:
        """Blocks that could all be evicted now."""
        return len(self._unheld)

    def find(self, block_hash: bytes) -> int | None:
        return self._block_of.get(block_hash)

    def match(self, hashes: list[bytes], max_blocks: int) -> list[int]:
        """Ids of the longest run of blocks, from the first hash on, that are all here."""
        found: list[int] = []
        for block_hash in hashes[:max_blocks]:
            block_id = self._block_of.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def covers(self, parent_hash: bytes, token_ids: list[int]) -> bool:
        """Whether a published block already begins with all of these tokens, and goes on."""
        return any(block_id in self._cached for block_id in self.tails.longer(parent_hash, token_ids))

    def insert(self, block_id: int, content: BlockContent, user: BlockUser, now: float) -> list[int]:
        """Publish a held block whose content has been computed. Its parent must be published (or NO_BLOCK). Returns
        the partial blocks that it supersedes and that nobody held: they are given up."""
        parent_id, block_hash = content.parent_id, content.hash
        superseded = [
            other
            for other in self.tails.shorter(content.parent_hash, content.token_ids)
            if other != block_id and self.drop(other)
        ]
        self.tails.add(block_id, content.parent_hash, content.token_ids)
        parent = self._cached.get(parent_id)
        if parent is not None:
            parent.num_children += 1
        depth = 0 if parent is None else parent.depth + 1
        self._block_of[block_hash] = block_id
        self._cached[block_id] = CachedBlock(
            hash=block_hash,
            parent_id=parent_id,
            depth=depth,
            num_uses=1,
            num_children=0,
            last_used_s=now,
            num_sharers=1,
            last_sharer=user.name,
            priority=user.priority,
            tenant=user.tenant,
        )
        self._shares.published(user.tenant, user.max_blocks)
        self.sessions.own(block_id, user, now)
        return superseded

    def use(self, block_id: int, user: BlockUser, now: float) -> float:
        """A hit: the block is held (again). Returns for how many seconds nobody had held it."""
        block = self._cached[block_id]
        block.num_uses += 1
        if user.name != block.last_sharer:
            block.num_sharers += 1
            block.last_sharer = user.name
        block.priority = min(block.priority, user.priority)
        self.sessions.used(block_id, user, now)
        if block_id in self._unheld:
            self._unheld.discard(block_id)
            self._stamp.pop(block_id, None)
            return now - block.last_used_s
        return 0.0

    def retire(self, block_id: int, now: float) -> None:
        """The last holder let go: the block stays until its room is needed."""
        block = self._cached[block_id]
        block.last_used_s = now
        block.mark = self._policy.mark()
        self.sessions.retired(block_id, now)
        self._unheld.add(block_id)
        if block.num_children == 0:
            self._nominate(block_id)

    def evict(self) -> int:
        """Give up the least valuable candidate and return its id; first of tenants that have more than their share.
        Raises IndexError when nothing is unheld."""
        for candidates in self._shares.over():
            while candidates:
                _, stamp, block_id = heapq.heappop(candidates)
                if self._stamp.get(block_id) == stamp:
                    self._remove(block_id)
                    return block_id
        while True:
            key, stamp, block_id = heapq.heappop(self._candidates)
            if self._stamp.get(block_id) == stamp:
                break
        self._policy.evicted(key)
        self._remove(block_id)
        return block_id

    def drop(self, block_id: int) -> bool:
        """Give up this block if it is an unheld leaf. True if it went."""
        if block_id not in self._unheld or self._cached[block_id].num_children:
            return False
        self._remove(block_id)
        return True

    def info(self, block_id: int) -> CachedBlock:
        return self._cached[block_id]

    def _remove(self, block_id: int) -> None:
        block = self._cached.pop(block_id)
        del self._block_of[block.hash]
        self._shares.removed(block.tenant)
        self.tails.remove(block_id)
        self.sessions.disown(block_id)
        self._unheld.discard(block_id)
        self._stamp.pop(block_id, None)
        parent = self._cached.get(block.parent_id)
        if parent is not None:
            parent.num_children -= 1
            if parent.num_children == 0 and block.parent_id in self._unheld:
                self._nominate(block.parent_id)

    def _nominate(self, block_id: int) -> None:
        self._next_stamp += 1
        self._stamp[block_id] = self._next_stamp
        block = self._cached[block_id]
        candidate = (self._policy.key(block), self._next_stamp, block_id)
        heapq.heappush(self._candidates, candidate)
        self._shares.nominate(block.tenant, candidate, self._stamp)
        if len(self._candidates) > 64 + 4 * len(self._unheld):
            self._candidates = [entry for entry in self._candidates if self._stamp.get(entry[2]) == entry[1]]
            heapq.heapify(self._candidates)
