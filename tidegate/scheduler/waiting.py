"""What waits inside a worker for a slot: the gate's look-ahead, and what was preempted. In order of `state.order`.

A state whose next block is being computed by another one right now is parked until that block is there (or will not
come), so that requests which arrive together with one cold prefix compute it once. Parked states keep their place.
"""

from __future__ import annotations

import heapq

from tidegate.request import Phase
from tidegate.scheduler.state import RequestState


class WaitingStates:
    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, float, int, int], RequestState]] = []
        self._parked: dict[bytes, list[RequestState]] = {}
        self._num_waiting = 0
        self._num_tokens = 0

    def __len__(self) -> int:
        return self._num_waiting

    @property
    def num_tokens(self) -> int:
        """Tokens that the waiting states have, prompt and replayed output, cached or not."""
        return self._num_tokens

    def push(self, state: RequestState) -> None:
        self._num_waiting += 1
        self._num_tokens += len(state.token_ids)
        heapq.heappush(self._heap, (state.order, state))

    def peek(self) -> RequestState | None:
        """The next in order, parked ones left out."""
        while self._heap:
            state = self._heap[0][1]
            if state.phase is not Phase.FINISHED:
                return state
            heapq.heappop(self._heap)
        return None

    def pop(self) -> RequestState:
        """Take out what peek returned."""
        state = heapq.heappop(self._heap)[1]
        self._forget(state)
        return state

    def park(self, block_hash: bytes) -> None:
        """Set aside what peek returned until `wake` is called for this block."""
        state = heapq.heappop(self._heap)[1]
        self._parked.setdefault(block_hash, []).append(state)

    def wake(self, block_hash: bytes) -> None:
        """The block has been computed, or nobody computes it any more."""
        for state in self._parked.pop(block_hash, ()):
            if state.phase is not Phase.FINISHED:
                heapq.heappush(self._heap, (state.order, state))

    def remove(self, state: RequestState) -> None:
        """`state` ended while it waited; the caller has set its phase to FINISHED. Its heap entry goes in time."""
        self._forget(state)
        if len(self._heap) > 64 + 2 * self._num_waiting:
            self._heap = [entry for entry in self._heap if entry[1].phase is not Phase.FINISHED]
            heapq.heapify(self._heap)

    def _forget(self, state: RequestState) -> None:
        self._num_waiting -= 1
        self._num_tokens -= len(state.token_ids)
