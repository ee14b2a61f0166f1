"""The check that no block is lost, doubled or held by nobody. Run in tests after every step, and when idle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from tidegate.kv.block_pool import BlockPool


class AuditError(AssertionError):
    """Our own mistake in the books of the KV cache."""


def audit(pool: BlockPool, holdings: Iterable[list[int]]) -> None:
    """`holdings`: the block ids of everyone who holds any. Raises AuditError when the books do not add up."""
    free = pool.free_block_ids()
    if len(set(free)) != len(free):
        raise AuditError("a block is twice in the free list")
    held: Counter[int] = Counter()
    for block_ids in holdings:
        held.update(block_ids)
    for block_id in range(pool.num_blocks):
        if pool.num_holders(block_id) != held[block_id]:
            raise AuditError(
                f"block {block_id} has {pool.num_holders(block_id)} holders in the pool, {held[block_id]} in fact"
            )
    if overlap := set(free) & held.keys():
        raise AuditError(f"blocks {sorted(overlap)[:8]} are free and held")
    if cached_free := [block_id for block_id in free if block_id in pool.cache]:
        raise AuditError(f"blocks {cached_free[:8]} are free and published")
    if stale := [block_id for block_id in free if block_id in pool.cache.tails]:
        raise AuditError(f"blocks {stale[:8]} are free and offered for copying")
    if len(held) != pool.num_held:
        raise AuditError(f"{len(held)} blocks are held, the pool counts {pool.num_held}")
    if pool.num_free + pool.num_cached + pool.num_held != pool.num_blocks:
        raise AuditError(
            f"free {pool.num_free} + cached {pool.num_cached} + held {pool.num_held} is not {pool.num_blocks}"
        )
