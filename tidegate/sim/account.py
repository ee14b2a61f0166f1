"""Where every request and every token of a simulation went. What was sent, computed and delivered must add up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from tidegate.bench.outcome import Ending, Outcome
from tidegate.bench.score import Objectives, verdict
from tidegate.sim.simulator import Simulator


def account(outcomes: Sequence[Outcome], simulator: Simulator) -> dict[str, Any]:
    """Prompt tokens: those of requests that were answered are cached or computed. Output tokens: those computed were
    delivered, or dropped because their client was gone. Tokens of an engine: all it computed, replays included."""
    sent = [outcome for outcome in outcomes if outcome.ending is not Ending.UNSENT]
    endings = Counter(str(outcome.ending) for outcome in outcomes)
    answered = [outcome for outcome in sent if outcome.num_output_tokens]
    engines = [worker.engine for worker in simulator.workers.values()]
    num_delivered = sum(outcome.num_output_tokens for outcome in outcomes)
    num_output = sum(worker.num_tokens for worker in simulator.workers.values())
    blocks = [(engine.pool.num_free, engine.pool.num_cached, engine.pool.num_held) for engine in engines]
    return {
        "requests": {"sent": len(sent), "unsent": len(outcomes) - len(sent), **dict(sorted(endings.items()))},
        "prompt_tokens": {
            "sent": sum(outcome.num_prompt_tokens for outcome in sent),
            "answered": sum(outcome.num_prompt_tokens for outcome in answered),
            "cached": sum(outcome.num_cached_tokens for outcome in answered),
        },
        "output_tokens": {
            "computed": num_output,
            "delivered": num_delivered,
            "dropped": num_output - num_delivered,
        },
        "engine_tokens": {
            "computed": sum(engine.scheduler.stats.num_computed_tokens for engine in engines),
            "replayed": sum(engine.scheduler.stats.num_replayed_tokens for engine in engines),
        },
        "preemptions": sum(engine.scheduler.stats.num_preemptions for engine in engines),
        "evicted_blocks": sum(engine.pool.stats.num_evictions for engine in engines),
        "workers": {
            worker.worker_id: {"steps": worker.num_steps, "busy_s": round(worker.busy_s, 6)}
            for worker in simulator.workers.values()
        },
        "adds_up": sum(endings.values()) == len(outcomes)
        and not simulator.outcomes
        and num_output >= num_delivered
        and all(
            sum(counts) == engine.pool.num_blocks and counts[2] == 0
            for counts, engine in zip(blocks, engines, strict=True)
        ),
    }


def request_records(outcomes: Sequence[Outcome], objectives: Objectives) -> list[dict[str, Any]]:
    """One record a request, in order of arrival. Seconds from the start of the run."""
    return [_record(outcome, objectives) for outcome in outcomes]


def _record(outcome: Outcome, objectives: Objectives) -> dict[str, Any]:
    item = outcome.item
    record: dict[str, Any] = {
        "index": item.index,
        "arrival_s": round(outcome.arrival_s, 6),
        "class": item.length_class,
        "verdict": str(verdict(outcome, objectives)),
        "prompt_tokens": outcome.num_prompt_tokens or item.num_prompt_tokens,
        "cached_tokens": outcome.num_cached_tokens,
        "wanted_tokens": item.num_output_tokens,
        "output_tokens": outcome.num_output_tokens,
        "ttft_s": _rounded(outcome.ttft_s),
        "tpot_s": _rounded(outcome.tpot_s),
        "ended_s": round(outcome.ended_s, 6),
    }
    extras = {"tenant": item.tenant, "tier": item.tier, "code": outcome.code}
    return record | {name: value for name, value in extras.items() if value}


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
