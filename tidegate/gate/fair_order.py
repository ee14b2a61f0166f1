"""Whose turn it is among tenants: decided each time a request is handed out, by virtual token counters.

    rank 0   tenant a  [r3 r7 r9]     the tenant with the least counter in the first rank has its turn, with its first
             tenant b  [r4]           request; its prompt is charged at once (less what turns out to be cached), its
    rank 1   tenant b  [r1 r2]        answer as it is produced

Slots are held for seconds, so turns alone do not protect a tenant that uses little from one that has taken all slots
while nobody else came. A tenant owns a part of the slots by its weight among those that were here lately; what it holds
beyond that it borrows. A request that borrows makes way for one that does not (`preempt`: in the worker, as a lower
tier does), or may not take the last slots (`reserve`). See docs/decisions/fairness-slots.md.

Owns: counters, what each tenant holds, the turns. Never: whether a worker can take a request (dispatched.py).
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Mapping

from tidegate.config import GateConfig, TenantConfig
from tidegate.gate.queue import QueuedRequest, WaitingQueue
from tidegate.tenancy.fairness import TokenCounters

CREDIT_TOKENS = 1_000.0
_WAITING_KEY = 2.0**40  # order keys of those that wait lie above those of the handed out
_RECENT_S = 60.0
_MAX_TRIED = 64


class FairOrder:
    def __init__(self, tenants: Mapping[str, TenantConfig], config: GateConfig) -> None:
        self._counters = TokenCounters(_weights(tenants), credit=CREDIT_TOKENS)
        self._num_known = len(tenants)
        self._mode = config.fair_slots
        self._turns: defaultdict[int, list[tuple[float, str]]] = defaultdict(list)
        self._num_waiting: Counter[str] = Counter()
        self._waiting_cost: defaultdict[str, float] = defaultdict(float)
        self._num_slots: Counter[str] = Counter()
        self._seen_s: OrderedDict[str, float] = OrderedDict()  # who was here lately, the latest last
        self._weight_seen = 0.0
        self._num_handed_out = 0
        self.num_slots_total = 0

    def reconfigure(self, tenants: Mapping[str, TenantConfig], config: GateConfig) -> None:
        self._counters.reweigh(_weights(tenants))
        self._num_known = len(tenants)
        self._mode = config.fair_slots
        self._weight_seen = sum(self._counters.weight(tenant) for tenant in self._seen_s)

    # What happens to requests.

    def seen(self, tenant: str, now: float) -> None:
        """A request of the tenant has come."""
        if tenant not in self._seen_s:
            self._weight_seen += self._counters.weight(tenant)
        self._seen_s[tenant] = now
        self._seen_s.move_to_end(tenant)
        while True:
            oldest, seen_s = next(iter(self._seen_s.items()))
            if seen_s >= now - _RECENT_S:
                return
            if self._num_waiting[oldest] or self._num_slots[oldest]:
                self._seen_s[oldest] = now
                self._seen_s.move_to_end(oldest)
                continue
            self._forget(oldest)

    def _forget(self, tenant: str) -> None:
        del self._seen_s[tenant]
        self._weight_seen -= self._counters.weight(tenant)
        self._counters.forget(tenant)
        for books in (self._num_waiting, self._num_slots, self._waiting_cost):
            books.pop(tenant, None)

    def joined(self, queued: QueuedRequest, queue: WaitingQueue) -> None:
        """It waits now."""
        tenant = queued.request.tenant
        self._counters.begin_to_wait(tenant)
        self._num_waiting[tenant] += 1
        self._waiting_cost[tenant] += queued.fair_cost
        self.moved(queued, queue)

    def moved(self, queued: QueuedRequest, queue: WaitingQueue) -> None:
        """It waits in another rank now."""
        tenant = queued.request.tenant
        if len(queue.lane(queued.rank, tenant)) == 1:
            heapq.heappush(self._turns[queued.rank], (self._counters.counter(tenant), tenant))

    def left(self, queued: QueuedRequest) -> None:
        """It does not wait any more."""
        tenant = queued.request.tenant
        self._num_waiting[tenant] -= 1
        self._waiting_cost[tenant] -= queued.fair_cost
        if not self._num_waiting[tenant]:
            self._waiting_cost[tenant] = 0.0
            self._counters.end_to_wait(tenant)

    def handed_out(self, queued: QueuedRequest) -> float:
        """A worker gets it. Returns its place among those that workers have."""
        self._counters.charge(queued.request.tenant, queued.request.num_prompt_tokens, 0)
        self._num_slots[queued.request.tenant] += queued.request.params.n
        self._num_handed_out += 1
        return float(self._num_handed_out)

    def taken_back(self, queued: QueuedRequest) -> None:
        """Its worker is gone, and had not begun with it."""
        self._charge(queued, -queued.request.num_prompt_tokens, 0)

    def produced(self, queued: QueuedRequest, num_cached_tokens: int, num_tokens: int) -> None:
        """What a step brought the request."""
        self._charge(queued, -num_cached_tokens, num_tokens)

    def gave_back(self, tenant: str, num_slots: int) -> None:
        self._num_slots[tenant] -= num_slots

    def _charge(self, queued: QueuedRequest, num_prompt_tokens: int, num_tokens: int) -> None:
        tenant = queued.request.tenant
        self._counters.charge(tenant, num_prompt_tokens, num_tokens)
        if num_prompt_tokens < 0 and self._num_waiting[tenant]:
            for turns in self._turns.values():  # entries may only be too low
                heapq.heappush(turns, (self._counters.counter(tenant), tenant))

    # What follows from it.

    def cost(self, tenant: str, num_prompt_tokens: int, expected_output: float) -> float:
        return self._counters.cost(tenant, num_prompt_tokens, expected_output)

    def waiting_key(self, tenant: str) -> float:
        """Where the tenant's next request would wait, among all that wait: for predictions. Turns decide in the end."""
        return _WAITING_KEY + self._counters.counter(tenant) + self._waiting_cost[tenant]

    def share(self, tenant: str) -> float:
        """The tenant's share of the machine: its weight among those who were here lately, itself and, where others
        are known, one newcomer among them."""
        weight = self._counters.weight(tenant)
        total = self._weight_seen + (0.0 if tenant in self._seen_s else weight)
        if self._num_known > len(self._seen_s) and self._seen_s:
            total += self._weight_seen / len(self._seen_s)
        return weight / max(total, weight)

    def borrows(self, tenant: str) -> bool:
        """Whether the tenant's next slot would be beyond its share."""
        owned = max(1.0, self.share(tenant) * self.num_slots_total)
        return self._mode != "turns" and self._num_slots[tenant] + 1 > owned

    def hand_out(self, queue: WaitingQueue) -> Iterator[QueuedRequest]:
        """Those whose turn it is, one after the other. Where one is taken out of the queue in between, the next turn is
        decided anew; where not, it is passed over."""
        num_tried = 0
        for rank in queue.ranks():
            turns = self._turns[rank]
            tenants = queue.tenants_in(rank)
            if len(turns) > 64 + 4 * len(tenants):
                turns[:] = [(self._counters.counter(tenant), tenant) for tenant in tenants]
                heapq.heapify(turns)
            num_passed: Counter[str] = Counter()
            done: set[str] = set()
            while turns and num_tried < _MAX_TRIED:
                known, tenant = turns[0]
                lane = queue.lane(rank, tenant)
                counter = self._counters.counter(tenant)
                if len(lane) <= num_passed[tenant] or tenant in done:
                    heapq.heappop(turns)
                    if lane:
                        done.add(tenant)
                elif counter > known:
                    heapq.heapreplace(turns, (counter, tenant))
                else:
                    queued = queue.at(lane[num_passed[tenant]])
                    queued.is_borrowing = self.borrows(tenant)
                    num_tried += 1
                    yield queued
                    num_passed[tenant] += not queued.is_gone
            for tenant in done:
                heapq.heappush(turns, (self._counters.counter(tenant), tenant))


def _weights(tenants: Mapping[str, TenantConfig]) -> dict[str, float]:
    return {name: tenant.weight for name, tenant in tenants.items()}
