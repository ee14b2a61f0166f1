"""`tidegate bench tenants`: what tenants do to each other, simulated, and what a decision costs with 1,000 of them.

The gate, admission and engine of the server, on a machine whose steps cost what those of the default model do on two
cores. The mix is `uniform`: prompts of 64-512 tokens, answers of 32-128. A share is half of what the machine can do.
"""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any, Literal

from tidegate.bench.report import check_writable, console_for, percentile, plain_table, write_json
from tidegate.config import Config, GateConfig, TenantConfig, TierConfig
from tidegate.cost_model import StepCost
from tidegate.executor.base import ExecutorInfo
from tidegate.gate.gate import Gate
from tidegate.request import Request, SamplingParams
from tidegate.sim.simulator import SimArrival, SimOutcome, Simulator
from tidegate.tenancy.quota import Granted, TenantQuota
from tidegate.version import __version__
from tidegate.worker.messages import PROTOCOL_VERSION, WorkerInfo

COST = StepCost(base_s=0.009, decode_row_s=0.0011, prefill_token_s=0.00054)
CAPACITY = 3.4
"""Requests of the mix a second that the machine completes."""
SLO_S, TPOT_S = 2.0, 0.15
FairSlots = Literal["preempt", "reserve", "turns"]


def run(json_path: str | None = None) -> int:
    """Returns the exit code: 1 when a figure misses its limit."""
    check_writable(json_path)
    console = console_for(json_path)
    noisy = {slots: noisy_and_quiet(slots) for slots in ("preempt", "reserve", "turns")}
    results: dict[str, Any] = {
        "noisy_and_quiet": noisy,
        "weights_3_to_1": backlogged(weight=3.0),
        "all_priority": backlogged(weight=1.0, budget=1_000),
        "many": many_tenants(1_000),
    }
    rows = [(slots, *(f"{value:.3f}" for value in figures.values())) for slots, figures in noisy.items()]
    console.print(
        plain_table("A noisy tenant at 5x its share beside a quiet one at 0.5x", ("slots", *noisy["turns"]), rows)
    )
    for name in ("weights_3_to_1", "all_priority", "many"):
        figures = results[name]
        console.print(plain_table(name, tuple(figures), [tuple(f"{value:,.3f}" for value in figures.values())]))
    write_json(results, json_path)
    chosen = noisy["preempt"]
    is_met = (
        chosen["quiet_p95_ttft_s"] <= 1.5 * chosen["alone_p95_ttft_s"] + chosen["step_s"]
        and chosen["quiet_goodput"] >= 0.95
        and chosen["total_of_noisy_alone"] >= 0.93
        and abs(results["weights_3_to_1"]["ratio"] / 3.0 - 1.0) <= 0.05
        and results["all_priority"]["share_of_other"] >= 0.45
        and results["many"]["decision_p50_us"] <= 300.0
        and results["many"]["memory_mb"] <= 50.0
    )
    return 0 if is_met else 1


def noisy_and_quiet(slots: FairSlots, num_quiet: int = 220) -> dict[str, float]:
    share = CAPACITY / 2
    duration_s = num_quiet / (0.5 * share)
    quiet = list(_poisson("quiet", 0.5 * share, duration_s, seed=1))
    noisy = list(_poisson("noisy", 5.0 * share, duration_s, seed=2))
    alone = _served(slots, quiet)
    noisy_alone = _served(slots, noisy)
    both = _served(slots, sorted([*quiet, *noisy], key=lambda arrival: arrival.request.arrival_s))
    beside = [outcome for outcome in both if outcome.request.tenant == "quiet"]
    step_s = COST.base_s + 16 * COST.decode_row_s + 512 * COST.prefill_token_s
    return {
        "alone_p95_ttft_s": _p95(alone),
        "quiet_p95_ttft_s": _p95(beside),
        "step_s": min(step_s, TPOT_S),
        "quiet_goodput": sum(map(_is_good, beside)) / len(beside),
        "alone_goodput": sum(map(_is_good, alone)) / len(alone),
        "noisy_goodput": sum(map(_is_good, both)) - sum(map(_is_good, beside)),
        "total_of_noisy_alone": _tokens(both, duration_s) / _tokens(noisy_alone, duration_s),
    }


def backlogged(weight: float, budget: int | None = None, duration_s: float = 90.0) -> dict[str, float]:
    """Two tenants, each with more than the machine can do; tokens of the middle minute. With a `budget`, the first
    marks everything `priority`."""
    tier = "priority" if budget is not None else "default"
    first = TenantConfig(weight=weight, tier_tokens_per_minute={} if budget is None else {"priority": budget})
    arrivals = sorted(
        [
            *_quota_limited(list(_poisson("first", 1.5 * CAPACITY, duration_s, seed=3, tier=tier)), first),
            *_poisson("other", 1.5 * CAPACITY, duration_s, seed=4),
        ],
        key=lambda arrival: arrival.request.arrival_s,
    )
    config = Config(tenants={"first": first, "other": TenantConfig()}, gate=GateConfig(order="fair"))
    simulator = Simulator(config, _info(), COST)
    tokens = {"first": 0, "other": 0}
    for outcome in simulator.run(arrivals):
        if outcome.first_token_s is not None and outcome.last_token_s is not None:
            begins, ends = outcome.first_token_s, outcome.last_token_s
            inside = max(0.0, min(ends, 80.0) - max(begins, 20.0)) / max(ends - begins, 1e-9)
            tokens[outcome.request.tenant] += round(inside * outcome.num_output_tokens)
    return {
        "first_tokens": tokens["first"],
        "other_tokens": tokens["other"],
        "ratio": tokens["first"] / max(1, tokens["other"]),
        "share_of_other": tokens["other"] / max(1, sum(tokens.values())),
    }


def many_tenants(num_tenants: int, num_timed: int = 2_000) -> dict[str, float]:
    """Microseconds of Gate.submit and of a quota's decision, and the memory of so many tenants that all wait."""
    names = [f"t{i}" for i in range(num_tenants)]
    limits = TenantConfig(requests_per_minute=10_000, tokens_per_minute=10_000_000, max_concurrent=64)
    tracemalloc.start()
    tiers = {"default": TierConfig(ttft_slo=36_000.0, tpot_slo=0.5, max_queued=10_000_000)}
    config = Config(
        tenants=dict.fromkeys(names, limits), tiers=tiers, gate=GateConfig(max_queued=10_000_000, order="fair")
    )
    gate = Gate(config)
    quotas = {name: TenantQuota(limits, 0.0) for name in names}
    gate.worker_ready(_worker(), 0.0)
    rng = random.Random(5)
    for i, name in enumerate(names):
        gate.submit(_request(f"w{i}", name, rng, 0.0, "default"), 0.0)
    memory_mb = tracemalloc.get_traced_memory()[0] / 1e6
    tracemalloc.stop()
    took_us = []
    for i in range(num_timed):
        request = _request(f"r{i}", rng.choice(names), rng, 1.0, "default")
        started_s = time.perf_counter()
        quotas[request.tenant].admit(request.request_id, "default", request.num_prompt_tokens, request.max_tokens, 1.0)
        gate.submit(request, 1.0)
        took_us.append((time.perf_counter() - started_s) * 1e6)
        gate.cancel(request.request_id, 1.0)
        quotas[request.tenant].end(request.request_id, 1.0)
    took_us.sort()
    return {
        "decision_p50_us": percentile(took_us, 0.5),
        "decision_p99_us": percentile(took_us, 0.99),
        "memory_mb": memory_mb,
    }


def _served(slots: FairSlots, arrivals: list[SimArrival]) -> list[SimOutcome]:
    tenants = {"noisy": TenantConfig(), "quiet": TenantConfig()}
    config = Config(tenants=tenants, gate=GateConfig(order="fair", fair_slots=slots))
    return Simulator(config, _info(), COST).run(arrivals)


def _quota_limited(arrivals: list[SimArrival], config: TenantConfig) -> Iterator[SimArrival]:
    """As the tenant's tier budgets let them be served; answers are charged at once."""
    quota = TenantQuota(config, 0.0)
    for arrival in arrivals:
        request = arrival.request
        granted = quota.admit(
            request.request_id, request.tier, request.num_prompt_tokens, request.max_tokens, request.arrival_s
        )
        if isinstance(granted, Granted):
            quota.produced(request.request_id, request.max_tokens, request.arrival_s)
            request.tier = granted.tier
            yield arrival


def _poisson(tenant: str, rate: float, duration_s: float, *, seed: int, tier: str = "default") -> Iterator[SimArrival]:
    rng = random.Random(seed)
    now, number = 0.0, 0
    while (now := now + rng.expovariate(rate)) < duration_s:
        number += 1
        yield SimArrival(_request(f"{tenant}{number}", tenant, rng, now, tier))


def _request(name: str, tenant: str, rng: random.Random, now: float, tier: str) -> Request:
    max_tokens = rng.randint(32, 128)
    return Request(
        request_id=name,
        prompt_token_ids=[rng.randrange(1_000) for _ in range(rng.randint(64, 512))],
        params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        max_tokens=max_tokens,
        seed=0,
        arrival_s=now,
        tenant=tenant,
        namespace=tenant,
        tier=tier,
    )


def _is_good(outcome: SimOutcome) -> bool:
    ttft_s, tpot_s = outcome.ttft_s, outcome.tpot_s
    return outcome.outcome == "length" and ttft_s is not None and ttft_s <= SLO_S and (tpot_s or 0.0) <= TPOT_S


def _p95(outcomes: list[SimOutcome]) -> float:
    """Of all requests; one without a token counts as the longest."""
    return percentile(sorted(SLO_S * 5 if o.ttft_s is None else o.ttft_s for o in outcomes), 0.95)


def _tokens(outcomes: list[SimOutcome], duration_s: float) -> float:
    """Tokens a second, of prompts and answers."""
    served = [
        o for o in outcomes if o.num_output_tokens and o.first_token_s is not None and o.first_token_s <= duration_s
    ]
    return sum(o.request.num_prompt_tokens + o.num_output_tokens for o in served) / duration_s


def _info() -> ExecutorInfo:
    return ExecutorInfo(
        model="sim", weight_digest="", weight_format="none", kv_cache_dtype="u8", compute_dtype="none",
        block_size=32, num_blocks=1_500, bytes_per_block=1, vocab_size=1_000, max_model_len=8_192,
    )  # fmt: skip


def _worker() -> WorkerInfo:
    info = _info()
    return WorkerInfo(
        worker_id="w", incarnation="i", pid=0, version=__version__, protocol_version=PROTOCOL_VERSION, model="sim",
        weight_digest="", weight_format="none", kv_cache_dtype="u8", compute_dtype="none", block_size=32,
        num_blocks=info.num_blocks, bytes_per_block=1, vocab_size=1_000, max_model_len=8_192, max_num_seqs=16,
        max_num_batched_tokens=512,
    )  # fmt: skip
