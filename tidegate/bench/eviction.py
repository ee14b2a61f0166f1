"""How many tokens each eviction policy finds again: on a mix of our own, and on published traces.

The real block pool, one request after the other: hold what is cached, compute the rest, let go. What a policy is worth
is the share of prompt tokens that it hits.

The mix: assistants with a long prompt of their own that many users share, conversations that come back after a while
(or never), and one-off prompts that nobody sends again. A Mooncake trace (FAST 2025; JSON lines with `timestamp` in ms
and `hash_ids`, one id for 512 tokens of prefix) is read as it is published, gzipped or not.
"""

from __future__ import annotations

import gzip
import heapq
import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from tidegate.kv.block_pool import NO_BLOCK, BlockContent, BlockPool, BlockUser
from tidegate.kv.eviction import PolicyName

MOONCAKE_BLOCK_TOKENS = 512
_MIX_BLOCK_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Access:
    """A request: when it comes, who sends it, and the names of its prompt's blocks, each of which implies those
    before it."""

    time_s: float
    user: str
    block_names: list[int]


@dataclass(slots=True)
class HitCount:
    num_blocks: int = 0
    num_hits: int = 0

    @property
    def share(self) -> float:
        return self.num_hits / max(1, self.num_blocks)


def replay(accesses: Iterable[Access], policy: PolicyName, capacity_blocks: int) -> HitCount:
    """Requests that do not fit at all are counted as misses and change nothing."""
    pool = BlockPool(capacity_blocks, policy)
    count = HitCount()
    for access in accesses:
        count.num_blocks += len(access.block_names)
        count.num_hits += _serve(pool, access)
    return count


def _serve(pool: BlockPool, access: Access) -> int:
    hashes = [name.to_bytes(8, "big") for name in access.block_names]
    user = BlockUser(access.user)
    hits = pool.cache.match(hashes, len(hashes))
    pool.hold(hits, user, access.time_s)
    new = pool.allocate(len(hashes) - len(hits), access.time_s)
    if new is None:
        pool.release(hits, access.time_s)
        return len(hits)
    blocks = hits + new
    for i in range(len(hits), len(blocks)):
        parent_id, parent_hash = (blocks[i - 1], hashes[i - 1]) if i else (NO_BLOCK, b"")
        content = BlockContent(hashes[i], parent_hash, parent_id, [access.block_names[i]])
        blocks[i] = pool.publish(blocks[i], content, user, access.time_s)
    pool.release(blocks, access.time_s)
    return len(hits)


def mix(num_requests: int = 20_000, *, seed: int = 0, assistants: int = 8, one_off_share: float = 0.4) -> list[Access]:
    """Requests of the mix, about ten a second, in order of time. 32-token blocks."""
    rng = random.Random(seed)
    names = iter(range(1, 1 << 60))
    prompts = [[next(names) for _ in range(rng.randint(20, 60))] for _ in range(assistants)]
    weights = [1.0 / (rank + 1) for rank in range(assistants)]
    accesses: list[Access] = []
    returns: list[tuple[float, int, list[int]]] = []  # conversations by the time of their next turn
    time_s = 0.0
    for i in range(num_requests):
        time_s += rng.expovariate(10.0)
        if returns and returns[0][0] <= time_s:
            _, conversation, blocks = heapq.heappop(returns)
            blocks = blocks + [next(names) for _ in range(rng.randint(2, 10))]
        elif rng.random() < one_off_share:
            accesses.append(Access(time_s, f"one-off-{i}", [next(names) for _ in range(rng.randint(5, 60))]))
            continue
        else:
            conversation = i
            own = [next(names) for _ in range(rng.randint(2, 10))]
            blocks = rng.choices(prompts, weights)[0] + own
        accesses.append(Access(time_s, f"chat-{conversation}", blocks))
        if rng.random() < 0.7:
            heapq.heappush(returns, (time_s + rng.expovariate(1 / 60.0), conversation, blocks))
    return accesses


def read_mooncake(path: Path) -> Iterator[Access]:
    """Raises OSError, ValueError."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        for i, line in enumerate(lines):
            entry = json.loads(line)
            yield Access(entry["timestamp"] / 1000.0, f"r{i}", entry["hash_ids"])


def measure(accesses: list[Access], block_tokens: int, capacities_tokens: Iterable[int]) -> list[dict[str, object]]:
    """One row a capacity: the share of prompt blocks that each policy hits."""
    return [
        {
            "capacity_tokens": capacity,
            **{policy: replay(accesses, policy, capacity // block_tokens).share for policy in get_args(PolicyName)},
        }
        for capacity in capacities_tokens
    ]
