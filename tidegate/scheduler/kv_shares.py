"""How many blocks a tenant's running requests may hold together.

A request joins only where it, and what its tenant's others are expected to grow by, stay within the share; it waits for
an end of one of those, and others overtake it. Where growth was underestimated, the tenant's own worst placed request
gives way. So a share is never exceeded. Blocks that several requests of a tenant hold count once.

Owns: the arithmetic. Never: blocks, or the waiting states (the scheduler). Requests without a share cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tidegate.request import Request
from tidegate.scheduler.output_length import peak_growth
from tidegate.scheduler.state import RequestState


class KvShares:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._num_blocks = num_blocks
        self._block_size = block_size

    def max_blocks(self, request: Request) -> int | None:
        """Blocks that the request's tenant may hold; None where that is all of them."""
        return None if request.max_kv_share >= 1.0 else max(1, int(request.max_kv_share * self._num_blocks))

    def may_join(
        self,
        state: RequestState,
        cached: Sequence[int],
        num_new: int,
        running: Iterable[RequestState],
        expected_remaining: Callable[[RequestState], float],
    ) -> bool:
        """Whether the state may take `num_new` blocks beside the `cached` ones. Always where its tenant is alone."""
        limit = self.max_blocks(state.request)
        if limit is None:
            return True
        others = of_same_tenant(state, running)
        if not others:
            return True
        num_left = limit - num_new - len(_held(others).union(cached))
        growth = peak_growth(((expected_remaining(other), len(other.block_ids)) for other in others), self._block_size)
        return num_left >= growth

    def may_grow(self, state: RequestState, running: Iterable[RequestState]) -> bool:
        """Whether a running state may take one block more."""
        limit = self.max_blocks(state.request)
        return limit is None or len(_held(of_same_tenant(state, running))) < limit


def share_key(state: RequestState) -> bytes:
    """What states wait for whose tenant has its share: any name that no block has."""
    return b"share:" + state.request.tenant.encode()


def of_same_tenant(state: RequestState, running: Iterable[RequestState]) -> list[RequestState]:
    tenant = state.request.tenant
    return [other for other in running if other.request.tenant == tenant]


def _held(states: Iterable[RequestState]) -> set[int]:
    return {block_id for state in states for block_id in state.block_ids}
