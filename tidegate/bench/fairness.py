"""How evenly tenants were served. Pure.

Service is counted in tokens that had to be computed: a prompt's uncached ones when its answer begins, and each token of
the answer. `jain` is Jain's index of service per weight (Jain, Chiu, Hawe 1984): 1 is even, 1/n is one tenant alone.
`max_service_gap` is the largest difference in service per weight that built up between two tenants while both had
requests unanswered (the bound that fair queueing is judged by; Sheng et al. 2024 for tokens).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations

from tidegate.bench.outcome import Ending, Outcome

_MAX_TENANTS = 24  # pairs grow with the square: the busiest ones are compared

_Event = tuple[float, int, str, float]  # time, order (starts before service before ends), tenant, amount


def jain_index(values: Sequence[float]) -> float:
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares > 0 else 1.0


def service_by_tenant(outcomes: Sequence[Outcome], weights: Mapping[str, float]) -> dict[str, float]:
    """Tokens per weight."""
    service: dict[str, float] = defaultdict(float)
    for outcome in outcomes:
        if outcome.ending is not Ending.UNSENT:
            service[outcome.item.tenant] += _num_service_tokens(outcome) / weights.get(outcome.item.tenant, 1.0)
    return dict(service)


def max_service_gap(outcomes: Sequence[Outcome], weights: Mapping[str, float]) -> float:
    service = service_by_tenant(outcomes, weights)
    busiest = sorted(service, key=service.__getitem__, reverse=True)[:_MAX_TENANTS]
    events: dict[str, list[_Event]] = {tenant: [] for tenant in busiest}
    for outcome in outcomes:
        if outcome.item.tenant in events and outcome.ending is not Ending.UNSENT:
            events[outcome.item.tenant] += _events(outcome, weights.get(outcome.item.tenant, 1.0))
    return max((_pair_gap(events[one], events[other]) for one, other in combinations(busiest, 2)), default=0.0)


def _num_service_tokens(outcome: Outcome) -> int:
    if not outcome.token_times:
        return 0
    return max(0, outcome.num_prompt_tokens - outcome.num_cached_tokens) + outcome.num_output_tokens


def _events(outcome: Outcome, weight: float) -> list[_Event]:
    tenant, times = outcome.item.tenant, outcome.token_times
    events: list[_Event] = [(outcome.arrival_s, 0, tenant, 0.0)]
    if times:
        per_event = outcome.num_output_tokens / len(times) / weight
        prompt = max(0, outcome.num_prompt_tokens - outcome.num_cached_tokens) / weight
        events.append((times[0], 1, tenant, prompt))
        events += [(time_s, 1, tenant, per_event) for time_s in times]
    events.append((max(outcome.ended_s, times[-1] if times else outcome.arrival_s), 2, tenant, 0.0))
    return events


def _pair_gap(one: list[_Event], other: list[_Event]) -> float:
    """The widest swing of the difference in service within one stretch of time in which both were waiting or served."""
    num_open: dict[str, int] = defaultdict(int)
    difference = low = high = gap = 0.0
    tenant_of_one = one[0][2]
    for _, kind, tenant, amount in sorted(one + other):
        if kind == 1 and len(num_open) == 2:
            difference += amount if tenant == tenant_of_one else -amount
            low, high = min(low, difference), max(high, difference)
            gap = max(gap, high - low)
        elif kind == 0:
            if not num_open.get(tenant):
                difference = low = high = 0.0
            num_open[tenant] += 1
        elif kind == 2:
            num_open[tenant] -= 1
            if not num_open[tenant]:
                del num_open[tenant]
    return gap
