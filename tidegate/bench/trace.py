"""From a trace to WorkItems: the same requests for the load generator and for the simulator.

    read_trace -> window -> spread equal times -> scale times and lengths -> tenants -> content -> [WorkItem]

Equal block ids are Segments with equal keys, so equal prefixes, in ids and in words; what has no block ids gets
content of its own. A trace whose clock ticks coarsely (Mooncake's conversations: every 3 s) has its groups of equal
times spread over the tick, since their burstiness is an artefact. Pure and seeded.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from statistics import median

from tidegate.bench.trace_file import MOONCAKE_BLOCK_TOKENS, Trace, TraceEntry, read_trace
from tidegate.bench.workload import FixedLength, LengthClass, Segment, TenantSpec, WorkItem, Workload
from tidegate.config import ConfigError, parse_duration

_KEY_BITS = 62
_CLASSES = (("short", 1_024), ("medium", 8_192))  # prompts of at most so many tokens; longer ones are "long"
_LONG = "long"
_COARSE_SHARE = 0.5  # of the requests share their time with another one: the clock is coarse


@dataclass(frozen=True)
class TraceOptions:
    """`scale_time` 2 is twice as slow (half the rate). `window` (from, to) in seconds of the trace, before scaling.

    `tenants`: how many are assigned, by Zipf's law with exponent `zipf`; 0 keeps those of the trace.
    """

    scale_time: float = 1.0
    scale_length: float = 1.0
    window: tuple[float, float] | None = None
    tenants: int = 0
    zipf: float = 1.0
    skip_bad: bool = False


def parse_options(
    scale_time: float, scale_length: float, window: str | None, assign_tenants: str | None, skip_bad: bool
) -> TraceOptions:
    """From the command line: `window` like 60s:120s (an end may be left out), `assign_tenants` like zipf, zipf:20 or
    zipf:20:1.2. Raises ConfigError."""
    if not (0.0 < scale_time < float("inf") and 0.0 < scale_length < float("inf")):
        raise ConfigError("--scale-time and --scale-length must be above 0")
    num_tenants, exponent = _parse_tenants(assign_tenants) if assign_tenants else (0, 1.0)
    return TraceOptions(
        scale_time, scale_length, _parse_window(window) if window else None, num_tenants, exponent, skip_bad
    )


def load_trace(path: str, options: TraceOptions) -> Trace:
    """Raises ConfigError, also when nothing lies in the window."""
    trace = read_trace(Path(path), skip_bad=options.skip_bad)
    if options.window is not None:
        start_s, end_s = options.window
        last_s = trace.entries[-1].time_s
        trace.entries = [entry for entry in trace.entries if start_s <= entry.time_s < end_s]
        if not trace.entries:
            raise ConfigError(f"no request of {path} lies in the window; the trace lasts {last_s:.0f} s")
    return trace


def trace_items(
    trace: Trace, options: TraceOptions, seed: int | str, *, content_seed: int | str = ""
) -> list[WorkItem]:
    """In order of arrival, from 0 on. Another `content_seed` says the same in other words."""
    times = _spread([entry.time_s for entry in trace.entries], random.Random(f"{seed} spread"))
    tenants_rng = random.Random(f"{seed} tenants")
    names = [f"tenant-{place + 1}" for place in range(options.tenants)]
    shares = [(place + 1) ** -options.zipf for place in range(options.tenants)]
    content = _Content(f"{seed} {content_seed}", options.scale_length)
    items = []
    start_s = options.window[0] if options.window is not None else 0.0
    for index, (time_s, entry) in enumerate(zip(times, trace.entries, strict=True)):
        segments = content.of(entry)
        num_output_tokens = _scaled(entry.num_output_tokens, options.scale_length)
        items.append(
            WorkItem(
                index=index,
                arrival_s=(time_s - start_s) * options.scale_time,
                content=segments,
                max_tokens=num_output_tokens,
                num_output_tokens=num_output_tokens,
                ignore_eos=True,
                length_class=_class_of(sum(segment.num_tokens for segment in segments)),
                tenant=tenants_rng.choices(names, shares)[0] if names else entry.tenant,
                tier=entry.tier,
            )
        )
    return items


def trace_workload(name: str, items: Sequence[WorkItem]) -> Workload:
    """What stands for the trace where a Workload is asked for (objectives, probes of an idle server, reports): its
    classes, at their median lengths."""
    by_class: dict[str, list[WorkItem]] = {}
    for item in items:
        by_class.setdefault(item.length_class, []).append(item)
    order = [class_name for class_name, _ in _CLASSES] + [_LONG]
    classes = tuple(
        LengthClass(
            name=class_name,
            share=len(by_class[class_name]),
            prompt=FixedLength(tokens=round(median(item.num_prompt_tokens for item in by_class[class_name]))),
            output=FixedLength(tokens=round(median(item.num_output_tokens for item in by_class[class_name]))),
        )
        for class_name in order
        if class_name in by_class
    )
    counts = Counter(item.tenant for item in items)
    tenants = tuple(TenantSpec(name=tenant, share=count) for tenant, count in sorted(counts.items()))
    return Workload(name=name, classes=classes, tenants=tenants)


class _Content:
    def __init__(self, seed: str, scale: float) -> None:
        self._seed = seed
        self._keys = random.Random(f"{seed} keys")
        self._scale = scale
        self._block_tokens = _scaled(MOONCAKE_BLOCK_TOKENS, scale)

    def of(self, entry: TraceEntry) -> tuple[Segment, ...]:
        num_tokens = _scaled(entry.num_prompt_tokens, self._scale)
        if not entry.block_ids:
            return (Segment(self._keys.getrandbits(_KEY_BITS), num_tokens),)
        segments = []
        for block_id in entry.block_ids:
            if num_tokens <= 0:
                break
            segments.append(Segment(self._key(block_id), min(num_tokens, self._block_tokens)))
            num_tokens -= self._block_tokens
        return tuple(segments)

    def _key(self, block_id: int) -> int:
        digest = blake2b(f"{self._seed} block {block_id}".encode(), digest_size=8).digest()
        return int.from_bytes(digest) >> (64 - _KEY_BITS)


def _spread(times: Sequence[float], rng: random.Random) -> list[float]:
    """`times`, ascending; where most of them coincide, each group is spread over one tick of that clock."""
    groups = Counter(times)
    num_shared = sum(count for count in groups.values() if count > 1)
    if num_shared < _COARSE_SHARE * len(times) or len(groups) < 2:
        return list(times)
    tick_s = median(later - earlier for earlier, later in pairwise(groups))
    spread: list[float] = []
    for time_s, count in groups.items():
        spread += sorted(time_s + rng.random() * tick_s for _ in range(count))
    return sorted(spread)


def _scaled(num_tokens: int, scale: float) -> int:
    return num_tokens if scale == 1.0 else max(1, round(num_tokens * scale))


def _class_of(num_prompt_tokens: int) -> str:
    return next((name for name, most in _CLASSES if num_prompt_tokens <= most), _LONG)


def _parse_window(text: str) -> tuple[float, float]:
    start, colon, end = text.partition(":")
    try:
        window = (_seconds(start) if start else 0.0, _seconds(end) if end else float("inf"))
    except ValueError:
        window = (0.0, 0.0)
    if not colon or not 0.0 <= window[0] < window[1]:
        raise ConfigError(f"--window takes two times of the trace, like 60s:120s or 10min:, not {text!r}")
    return window


def _seconds(text: str) -> float:
    value = parse_duration(text)
    assert isinstance(value, float)
    return value


def _parse_tenants(text: str) -> tuple[int, float]:
    kind, *rest = text.split(":")
    try:
        num_tenants = int(rest[0]) if rest else 10
        exponent = float(rest[1]) if len(rest) > 1 else 1.0
    except ValueError:
        num_tenants = exponent = -1
    if kind != "zipf" or not 1 <= num_tenants <= 100_000 or not 0.0 <= exponent <= 10.0 or len(rest) > 2:
        raise ConfigError(f"--assign-tenants takes zipf, zipf:NUMBER or zipf:NUMBER:EXPONENT, not {text!r}")
    return num_tenants, exponent


__all__ = ["Trace", "TraceOptions", "load_trace", "parse_options", "trace_items", "trace_workload"]
