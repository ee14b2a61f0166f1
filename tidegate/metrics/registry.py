"""ServerMetrics: everything /metrics says, in Prometheus' text format.

Owns: the metric names, which dashboards rely on. Request latencies come from Timelines alone, when a request ends
(whichever way it ends); step figures and load come from the worker's reports. Every method is a few additions: nothing
here is called once a token.

Never does: read a clock, hold requests, or use prometheus_client's global registry (a process may have two servers).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tidegate.metrics.admission import AdmissionMetrics
from tidegate.metrics.cache_life import cache_life_families
from tidegate.metrics.histogram import COUNT_BOUNDS, Histogram
from tidegate.metrics.load_snapshot import CacheLife, LoadReport, StepStats
from tidegate.metrics.timeline import Timeline

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

_BUSY_MEMORY = 0.98  # A step's weight in the busy share falls by this factor each step: about the last 50 count.


class ServerMetrics:
    """The figures of one server."""

    def __init__(self) -> None:
        self.admission = AdmissionMetrics()
        self._info: dict[str, str] = {}
        self._loads: dict[str, LoadReport] = {}
        self._lives: list[CacheLife] = []  # of workers that are gone
        self._num_queued = 0
        self._num_requests: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._histograms = {name: Histogram() for name in _LATENCIES} | {
            name: Histogram(COUNT_BOUNDS) for name in _COMPOSITION
        }
        self._busy_s = 0.0
        self._loop_s = 0.0
        self._recent_busy_s = 0.0
        self._recent_loop_s = 0.0
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_ServerCollector(self))
        ProcessCollector(registry=self._registry)

    def set_info(self, **labels: str) -> None:
        """What is served, as labels of `tidegate_info`."""
        self._info = labels

    def set_queued(self, num_queued: int) -> None:
        """Requests waiting at the gate."""
        self._num_queued = num_queued

    def set_load(self, load: LoadReport, worker_id: str = "") -> None:
        """The latest report of a worker. What is shown is the sum over workers."""
        self._loads[worker_id] = load

    def drop_worker(self, worker_id: str = "") -> None:
        """A worker is gone, and its load with it."""
        load = self._loads.pop(worker_id, None)
        if load is not None and load.cache is not None:
            self._lives.append(load.cache)

    def observe_step(self, stats: StepStats) -> None:
        self._histograms["step"].observe(stats.compute_s)
        self._histograms["step_prefill_tokens"].observe(stats.num_prefill_tokens)
        self._histograms["step_decode_rows"].observe(stats.num_decode_rows)
        self._counts["preemptions"] += stats.num_preemptions
        self._counts["evictions"] += stats.num_evictions
        self._busy_s += stats.compute_s
        self._loop_s += stats.loop_s
        self._recent_busy_s = self._recent_busy_s * _BUSY_MEMORY + stats.compute_s
        self._recent_loop_s = self._recent_loop_s * _BUSY_MEMORY + stats.loop_s

    def count_outcome(self, outcome: str) -> None:
        """A request that ended before it had a timeline: refused at the door."""
        self._num_requests[str(outcome)] += 1

    def observe_timeline(self, timeline: Timeline) -> None:
        """A request that has ended. Call once, after `finish`; what it lacks (no token, no TTFT) is not observed."""
        self.count_outcome(timeline.outcome)
        self._counts["prompt_tokens"] += timeline.num_prompt_tokens
        self._counts["cached_tokens"] += timeline.num_cached_tokens
        self._counts["generation_tokens"] += timeline.num_output_tokens
        for name, value_s in (
            ("ttft", timeline.ttft_s),
            ("tpot", timeline.tpot_s),
            ("e2e", timeline.e2e_s),
            ("queue", timeline.queue_s),
            ("prefill", timeline.prefill_s),
        ):
            if value_s is not None:
                self._histograms[name].observe(value_s)
        self._histograms["itl"].merge(timeline.itl)

    @property
    def executor_busy_share(self) -> float:
        """Share of the engine loop's recent time that the executor computed."""
        return self._recent_busy_s / self._recent_loop_s if self._recent_loop_s > 0.0 else 0.0

    def render(self) -> bytes:
        """The text that a Prometheus server scrapes, of type CONTENT_TYPE."""
        return generate_latest(self._registry)

    def families(self) -> Iterator[Metric]:
        """Every metric, as it is now."""
        loads = self._loads.values()
        yield InfoMetricFamily("tidegate", "What is served.", value=self._info)
        yield GaugeMetricFamily(
            "tidegate_requests_running", "Requests in a slot.", value=sum(load.num_running for load in loads)
        )
        yield GaugeMetricFamily(
            "tidegate_requests_waiting",
            "Requests waiting, at the gate or in a worker.",
            value=self._num_queued + sum(load.num_waiting for load in loads),
        )
        blocks = GaugeMetricFamily("tidegate_kv_blocks", "KV blocks by state.", labels=["state"])
        blocks.add_metric(["free"], sum(load.free_blocks for load in loads))
        blocks.add_metric(["cached"], sum(load.cached_blocks for load in loads))
        blocks.add_metric(["held"], sum(load.held_blocks for load in loads))
        yield blocks
        yield GaugeMetricFamily(
            "tidegate_executor_busy_share",
            "Share of the engine loop's recent time that the executor computed.",
            value=self.executor_busy_share,
        )
        requests = CounterMetricFamily("tidegate_requests", "Requests that have ended, by outcome.", labels=["outcome"])
        for outcome, num_requests in sorted(self._num_requests.items()):
            requests.add_metric([outcome], num_requests)
        yield requests
        yield from self.admission.families()
        for name, documentation in _COUNTERS.items():
            yield CounterMetricFamily(f"tidegate_{name}", documentation, value=self._counts[name])
        yield CounterMetricFamily("tidegate_executor_busy_seconds", "Time computing steps.", value=self._busy_s)
        yield CounterMetricFamily(
            "tidegate_engine_loop_seconds", "Time of the turns of the engine loop that had a step.", value=self._loop_s
        )
        yield from cache_life_families([*self._lives, *(load.cache for load in loads if load.cache is not None)])
        for name, documentation in _LATENCIES.items():
            yield _histogram_family(f"tidegate_{name}_seconds", documentation, self._histograms[name])
        for name, documentation in _COMPOSITION.items():
            yield _histogram_family(f"tidegate_{name}", documentation, self._histograms[name])


_COUNTERS = {
    "prompt_tokens": "Prompt tokens of requests that have ended.",
    "cached_tokens": "Prompt tokens that were not computed, because their blocks were cached.",
    "generation_tokens": "Output tokens of requests that have ended, aborted ones included.",
    "preemptions": "Requests that had to give their blocks back while running.",
    "evictions": "Cached blocks that were given to another use.",
}
_LATENCIES = {
    "ttft": "Time to first token: from the first byte of a request to its first token in the frontend.",
    "tpot": "Time per output token after the first, one value a request.",
    "itl": "Time between tokens, one value a token.",
    "e2e": "From the first byte of a request to its end.",
    "queue": "Waiting for a place, at the gate and in the worker.",
    "prefill": "From the first step that computed for a request to its first token.",
    "step": "Time from launching a step to its sampled tokens.",
}
_COMPOSITION = {
    "step_prefill_tokens": "Prefill tokens in a step.",
    "step_decode_rows": "Decode rows in a step.",
}


class _ServerCollector(Collector):
    """What the registry asks at each scrape."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return self._metrics.families()


def _histogram_family(name: str, documentation: str, histogram: Histogram) -> Metric:
    return HistogramMetricFamily(name, documentation, buckets=histogram.cumulative(), sum_value=histogram.total)
