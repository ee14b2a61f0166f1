"""Virtual token counters: whose turn it is (Sheng et al., Fairness in Serving Large Language Models, OSDI 2024).

Each tenant has a counter of the service it got, divided by its weight: uncached prompt tokens when a request is handed
out, output tokens, which cost more, as they are produced. The turn is that of the waiting tenant with the least
counter. One that begins to wait is lifted to the least counter of those who wait (idleness is not saved up), less a
credit: a tenant that uses little keeps that much of it, so that its requests that come together need not take turns.

Bound: while two tenants of equal weight both wait, the service they got in any time differs by at most
2 x (output_price x M + credit), where M is the most tokens that can be in the batch; with a credit of 0 it is the
paper's. Work-conserving: whoever waits has a turn when nobody else does.

Owns: the counters. Never: requests, slots, queues (gate/fair_order.py) or quotas.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping

PROMPT_PRICE = 1.0
OUTPUT_PRICE = 2.0


class TokenCounters:
    def __init__(
        self,
        weights: Mapping[str, float],
        *,
        prompt_price: float = PROMPT_PRICE,
        output_price: float = OUTPUT_PRICE,
        credit: float = 0.0,
    ) -> None:
        """`weights` of those that differ from 1. `credit` in prompt tokens of a tenant of weight 1."""
        self.output_price = output_price
        self._prompt_price = prompt_price
        self._credit = credit
        self._weights = dict(weights)
        self._counters: dict[str, float] = {}
        self._waiting: set[str] = set()
        # Lazily corrected: an entry counts for a tenant that waits, and as what its counter was at least.
        self._heap: list[tuple[float, str]] = []
        self._last_to_wait = 0.0

    def weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def reweigh(self, weights: Mapping[str, float]) -> None:
        self._weights = dict(weights)

    def counter(self, tenant: str) -> float:
        """What its counter is, or would be if it began to wait now."""
        counter = self._counters.get(tenant, 0.0)
        if tenant in self._waiting:
            return counter
        floor = self.least()
        return max(counter, (self._last_to_wait if floor is None else floor) - self._credit)

    def cost(self, tenant: str, num_prompt_tokens: float, num_output_tokens: float) -> float:
        """By how much the counter grows for this service."""
        price = self._prompt_price * num_prompt_tokens + self.output_price * num_output_tokens
        return price / self._weights.get(tenant, 1.0)

    def charge(self, tenant: str, num_prompt_tokens: float, num_output_tokens: float) -> None:
        """Service that the tenant got. Negative prompt tokens give back: they were cached."""
        counter = self._counters.get(tenant, 0.0) + self.cost(tenant, num_prompt_tokens, num_output_tokens)
        self._counters[tenant] = counter
        if num_prompt_tokens < 0 and tenant in self._waiting:
            self._push(tenant)

    def begin_to_wait(self, tenant: str) -> None:
        if tenant in self._waiting:
            return
        self._counters[tenant] = self.counter(tenant)
        self._waiting.add(tenant)
        self._push(tenant)

    def _push(self, tenant: str) -> None:
        heapq.heappush(self._heap, (self._counters[tenant], tenant))
        if len(self._heap) > 64 + 4 * len(self._waiting):
            self._heap = [(self._counters[name], name) for name in self._waiting]
            heapq.heapify(self._heap)

    def end_to_wait(self, tenant: str) -> None:
        if tenant in self._waiting:
            self._waiting.remove(tenant)
            self._last_to_wait = self._counters[tenant]

    def forget(self, tenant: str) -> None:
        """It has not been here for long. If it comes back it is lifted like any other."""
        if tenant not in self._waiting:
            self._counters.pop(tenant, None)

    def least(self) -> float | None:
        """The least counter of those that wait."""
        while self._heap:
            known, tenant = self._heap[0]
            counter = self._counters.get(tenant, 0.0)
            if tenant not in self._waiting or counter < known:
                heapq.heappop(self._heap)
            elif counter > known:
                heapq.heapreplace(self._heap, (counter, tenant))
            else:
                return known
        return None
