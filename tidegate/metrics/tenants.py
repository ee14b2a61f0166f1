"""What each tenant has used, for the operator alone: never on the open /metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

MAX_TENANTS = 200
"""So many, those with most tokens, have labels of their own; the others are one together."""
_OTHERS = "(others)"


def render_tenants(totals: Mapping[tuple[str, str, str], int]) -> bytes:
    """Prometheus' text for sums by (tenant, tier, measure)."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Totals(totals))
    return generate_latest(registry)


class _Totals(Collector):
    def __init__(self, totals: Mapping[tuple[str, str, str], int]) -> None:
        self._totals = totals

    def collect(self) -> Iterator[Metric]:
        tokens: Counter[str] = Counter()
        for (tenant, _, measure), amount in self._totals.items():
            tokens[tenant] += amount if measure.endswith("_tokens") else 0
        shown = {tenant for tenant, _ in tokens.most_common(MAX_TENANTS)}
        sums: Counter[tuple[str, str, str]] = Counter()
        for (tenant, tier, measure), amount in self._totals.items():
            sums[tenant if tenant in shown else _OTHERS, tier, measure] += amount
        family = CounterMetricFamily(
            "tidegate_tenant_usage", "What each tenant has used since the start.", labels=["tenant", "tier", "measure"]
        )
        for labels, amount in sorted(sums.items()):
            family.add_metric(list(labels), amount)
        yield family
