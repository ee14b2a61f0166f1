"""The waiting queue of the fleet: in order of (tier after ageing, --order inside it); each with its time to be seen to.

Owns: the order, and when something is due (a request ages, or can no longer be served in time). Never: why a request
waits, or where it goes.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from tidegate.admission.controller import Prediction
from tidegate.request import Request

Order = tuple[int, float, int]


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """`prediction`: what admission saw for it, frozen then. `due`: (time, what) pairs to come, soonest first; what is
    "age" or "expire". `is_borrowing`: it takes, or would take now, a slot beyond its tenant's share, and makes way for
    those of its rank that do not. `fair_cost`: what it counts in its tenant's line."""

    request: Request
    arrival_number: int
    prediction: Prediction | None = None
    rank: int = 0
    is_gone: bool = False
    due: list[tuple[float, str]] = field(default_factory=list)
    is_borrowing: bool = False
    fair_cost: float = 0.0

    @property
    def order(self) -> Order:
        """Its place among those that wait."""
        return (self.rank, self.request.order_key, self.arrival_number)

    @property
    def precedence(self) -> int:
        """Lower does not make way for higher."""
        return 2 * self.rank + self.is_borrowing

    @property
    def place(self) -> Order:
        """Its place in a worker."""
        return (2 * self.rank + self.is_borrowing, self.request.order_key, self.arrival_number)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The queue from one place in it: the first of those ahead, the prompt tokens of the others ahead, and the next
    behind."""

    ahead: list[QueuedRequest]
    num_other_tokens: int
    behind: list[QueuedRequest]


class WaitingQueue:
    def __init__(self) -> None:
        # In order, and parallel to it the prompt tokens of each.
        self._orders: list[Order] = []
        self._num_tokens: list[int] = []
        self._by_order: dict[Order, QueuedRequest] = {}
        self._by_id: dict[str, QueuedRequest] = {}
        self._due: list[tuple[float, int, str, QueuedRequest]] = []
        self._num_by_tier: Counter[str] = Counter()
        self._num_by_tenant: Counter[tuple[str, str]] = Counter()
        # The same orders by rank and tenant, each lane in order; empty ones are gone.
        self._lanes: dict[int, dict[str, list[Order]]] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def num_by_tier(self) -> dict[str, int]:
        return dict(self._num_by_tier)

    def num_of(self, tenant: str, tier: str) -> int:
        return self._num_by_tenant[tenant, tier]

    def ranks(self) -> list[int]:
        """Ranks in which requests wait, in order."""
        return sorted(self._lanes)

    def lane(self, rank: int, tenant: str) -> Sequence[Order]:
        """The places of a tenant's requests in this rank, in order."""
        return self._lanes.get(rank, {}).get(tenant, ())

    def tenants_in(self, rank: int) -> Collection[str]:
        """Those with requests in this rank."""
        return self._lanes.get(rank, {})

    def at(self, order: Order) -> QueuedRequest:
        return self._by_order[order]

    def push(self, queued: QueuedRequest) -> None:
        queued.is_gone = False
        self._by_id[queued.request.request_id] = queued
        self._insert(queued)
        self._num_by_tier[queued.request.tier] += 1
        self._num_by_tenant[queued.request.tenant, queued.request.tier] += 1
        for time_s, what in queued.due:
            heapq.heappush(self._due, (time_s, queued.arrival_number, what, queued))

    def peek(self) -> QueuedRequest | None:
        return self._by_order[self._orders[0]] if self._orders else None

    def first(self, limit: int) -> list[QueuedRequest]:
        return [self._by_order[order] for order in self._orders[:limit]]

    def around(self, order: Order, num_ahead: int, num_behind: int, num_shares: int) -> Surroundings:
        """The queue as seen from this place, where only each `num_shares`-th request counts."""
        at = bisect_left(self._orders, order)
        end = num_ahead * num_shares
        return Surroundings(
            ahead=[self._by_order[o] for o in self._orders[: min(at, end) : num_shares]],
            num_other_tokens=sum(self._num_tokens[end:at:num_shares]),
            behind=[self._by_order[o] for o in self._orders[at : at + num_behind * num_shares : num_shares]],
        )

    def remove(self, request_id: str) -> QueuedRequest | None:
        queued = self._by_id.pop(request_id, None)
        if queued is None:
            return None
        queued.is_gone = True
        self._take_out(queued)
        self._num_by_tier[queued.request.tier] -= 1
        whose = (queued.request.tenant, queued.request.tier)
        self._num_by_tenant[whose] -= 1
        if not self._num_by_tenant[whose]:
            del self._num_by_tenant[whose]
        if len(self._due) > 64 + 4 * len(self._by_id):
            self._due = [entry for entry in self._due if not entry[3].is_gone]
            heapq.heapify(self._due)
        return queued

    def move_up(self, queued: QueuedRequest) -> None:
        """Serve it with the tier above its own from now on."""
        self._take_out(queued)
        queued.rank -= 1
        self._insert(queued)

    def _insert(self, queued: QueuedRequest) -> None:
        order = queued.order
        at = bisect_left(self._orders, order)
        self._orders.insert(at, order)
        self._num_tokens.insert(at, queued.request.num_prompt_tokens)
        self._by_order[order] = queued
        insort(self._lanes.setdefault(queued.rank, {}).setdefault(queued.request.tenant, []), order)

    def _take_out(self, queued: QueuedRequest) -> None:
        order = queued.order
        at = bisect_left(self._orders, order)
        del self._orders[at]
        del self._num_tokens[at]
        del self._by_order[order]
        lanes = self._lanes[queued.rank]
        lane = lanes[queued.request.tenant]
        del lane[bisect_left(lane, order)]
        if not lane:
            del lanes[queued.request.tenant]
            if not lanes:
                del self._lanes[queued.rank]

    def next_due_s(self) -> float | None:
        while self._due and self._due[0][3].is_gone:
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else None

    def pop_due(self, now: float) -> list[tuple[str, QueuedRequest]]:
        """What is due by now, and for whom. They stay in the queue."""
        due = []
        while (time_s := self.next_due_s()) is not None and time_s <= now:
            _, _, what, queued = heapq.heappop(self._due)
            due.append((what, queued))
        return due
