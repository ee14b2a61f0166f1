"""Which tenants have more published blocks than their share, and which of those could go first.

Owns: how many published blocks are whose, and a second line of candidates for each tenant with a limit, in the order of
the eviction policy. Tenants without a limit cost one count a block. Never: blocks themselves (PrefixCache).
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping

Candidate = tuple[tuple[float, ...], int, int]
"""(key, stamp, block id): counts while its stamp is the block's current one."""


class CacheShares:
    def __init__(self) -> None:
        self._num_blocks: Counter[str] = Counter()
        self._limits: dict[str, int] = {}
        self._candidates: dict[str, list[Candidate]] = {}

    def published(self, tenant: str, max_blocks: int | None) -> None:
        self._num_blocks[tenant] += 1
        if max_blocks is None:
            self._limits.pop(tenant, None)
            self._candidates.pop(tenant, None)
        else:
            self._limits[tenant] = max_blocks

    def removed(self, tenant: str) -> None:
        self._num_blocks[tenant] -= 1
        if not self._num_blocks[tenant]:
            for books in (self._num_blocks, self._limits, self._candidates):
                books.pop(tenant, None)

    def nominate(self, tenant: str, candidate: Candidate, stamps: Mapping[int, int]) -> None:
        """A block of the tenant could go. `stamps`: the current one of each block."""
        if tenant not in self._limits:
            return
        candidates = self._candidates.setdefault(tenant, [])
        heapq.heappush(candidates, candidate)
        if len(candidates) > 64 + 4 * self._num_blocks[tenant]:
            candidates[:] = [entry for entry in candidates if stamps.get(entry[2]) == entry[1]]
            heapq.heapify(candidates)

    def over(self) -> Iterator[list[Candidate]]:
        """The candidates of each tenant that is over its limit; what is taken from them goes."""
        for tenant, limit in self._limits.items():
            if self._num_blocks[tenant] > limit and tenant in self._candidates:
                yield self._candidates[tenant]
