"""The waiting queue of the fleet: first come, first served within a priority, with a deadline for each.

Owns: the order and the deadlines. Never: why a request waits, or where it goes.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from tidegate.request import Request


@dataclass(slots=True)
class QueuedRequest:
    request: Request
    order: tuple[int, int]
    deadline_s: float
    is_gone: bool = False


class WaitingQueue:
    def __init__(self) -> None:
        self._by_order: list[tuple[tuple[int, int], QueuedRequest]] = []
        self._by_deadline: list[tuple[float, int, QueuedRequest]] = []
        self._by_id: dict[str, QueuedRequest] = {}
        self._num_arrived = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def push(self, request: Request, deadline_s: float) -> None:
        self._num_arrived += 1
        self._insert(QueuedRequest(request, (request.priority, self._num_arrived), deadline_s))

    def push_back(self, queued: QueuedRequest) -> None:
        """Return one that was taken out to its old place (its worker died before it had begun)."""
        queued.is_gone = False
        self._insert(queued)

    def peek(self) -> QueuedRequest | None:
        while self._by_order and self._by_order[0][1].is_gone:
            heapq.heappop(self._by_order)
        return self._by_order[0][1] if self._by_order else None

    def pop(self) -> QueuedRequest:
        """The next in order. Raises IndexError when the queue is empty."""
        queued = self.peek()
        if queued is None:
            raise IndexError("the queue is empty")
        return self._take(queued)

    def remove(self, request_id: str) -> QueuedRequest | None:
        queued = self._by_id.get(request_id)
        return self._take(queued) if queued is not None else None

    def next_deadline(self) -> float | None:
        while self._by_deadline and self._by_deadline[0][2].is_gone:
            heapq.heappop(self._by_deadline)
        return self._by_deadline[0][0] if self._by_deadline else None

    def pop_expired(self, now: float) -> list[QueuedRequest]:
        expired = []
        while (deadline_s := self.next_deadline()) is not None and deadline_s <= now:
            expired.append(self._take(self._by_deadline[0][2]))
        return expired

    def _insert(self, queued: QueuedRequest) -> None:
        self._by_id[queued.request.request_id] = queued
        heapq.heappush(self._by_order, (queued.order, queued))
        heapq.heappush(self._by_deadline, (queued.deadline_s, queued.order[1], queued))

    def _take(self, queued: QueuedRequest) -> QueuedRequest:
        queued.is_gone = True
        del self._by_id[queued.request.request_id]
        if len(self._by_order) > 64 + 2 * len(self._by_id):
            self._by_order = [entry for entry in self._by_order if not entry[1].is_gone]
            heapq.heapify(self._by_order)
        if len(self._by_deadline) > 64 + 2 * len(self._by_id):
            self._by_deadline = [entry for entry in self._by_deadline if not entry[2].is_gone]
            heapq.heapify(self._by_deadline)
        return queued
