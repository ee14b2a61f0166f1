"""What preemption costs: slots for 16, KV memory for 10, against as many slots as memory holds.

Simulated, so the ratios are exact. Three kinds of client: those whose answers are as long as they asked for, those
that ask for 1,024 tokens and stop after 16 to 300, as most do, and those that all do just the same at the same time,
so that every block is wanted at once.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Literal

from tidegate.config import Config, GateConfig, SchedulerConfig
from tidegate.cost_model import StepCost
from tidegate.executor.base import ExecutorInfo
from tidegate.request import Request, SamplingParams
from tidegate.sim.simulator import SimArrival, Simulator

NUM_REQUESTS = 400
_BLOCK_SIZE = 32
_PROMPT_LENGTHS = (64, 512)
_REAL_LENGTHS = (16, 300)
_OPEN_CAP = 1024
_EQUAL_LENGTHS = (128, 256)  # prompt, answer

Clients = Literal["stop at the cap", "stop early", "all alike"]
KINDS: tuple[Clients, ...] = ("stop at the cap", "stop early", "all alike")


@dataclass(frozen=True, slots=True)
class PreemptionRun:
    """num_computed_tokens counts everything computed, replays included."""

    tokens_per_s: float
    num_preemptions: int
    num_replayed_tokens: int
    num_computed_tokens: int
    mean_running: float

    @property
    def replayed_share(self) -> float:
        return self.num_replayed_tokens / self.num_computed_tokens


def workload(clients: Clients, seed: int, num_requests: int = NUM_REQUESTS) -> list[SimArrival]:
    """All there from the start."""
    rng = random.Random(seed)
    arrivals = []
    for i in range(num_requests):
        lengths = (rng.randint(*_PROMPT_LENGTHS), rng.randint(*_REAL_LENGTHS))
        num_prompt_tokens, length = _EQUAL_LENGTHS if clients == "all alike" else lengths
        stops_early = clients == "stop early"
        request = Request(
            request_id=f"r{i}",
            prompt_token_ids=[rng.randrange(1000) for _ in range(num_prompt_tokens)],
            params=SamplingParams(),
            max_tokens=_OPEN_CAP if stops_early else length,
            seed=i,
            arrival_s=0.0,
        )
        arrivals.append(SimArrival(request, length if stops_early else None))
    return arrivals


def run(arrivals: list[SimArrival], *, max_num_seqs: int, num_blocks: int) -> PreemptionRun:
    info = ExecutorInfo("sim", "0" * 64, "none", "u8", "none", _BLOCK_SIZE, num_blocks, 1, 1000, 4096)
    config = Config(scheduler=SchedulerConfig(max_num_seqs=max_num_seqs), gate=GateConfig(admission="off"))
    simulator = Simulator(config, info, StepCost())
    outcomes = simulator.run(arrivals)
    stats = simulator.workers["w0"].engine.scheduler.stats
    span_s = max(outcome.ended_s or 0.0 for outcome in outcomes)
    num_tokens = sum(outcome.num_output_tokens for outcome in outcomes)
    slot_s = sum((o.last_token_s or 0.0) - (o.first_token_s or 0.0) for o in outcomes)
    return PreemptionRun(
        tokens_per_s=num_tokens / span_s,
        num_preemptions=stats.num_preemptions,
        num_replayed_tokens=stats.num_replayed_tokens,
        num_computed_tokens=stats.num_computed_tokens,
        mean_running=slot_s / span_s,
    )


def blocks_for_ten(arrivals: list[SimArrival]) -> int:
    """KV blocks that ten requests of mean final size take."""
    sizes = [
        -(-(a.request.num_prompt_tokens + (a.hang_up_after or a.request.max_tokens)) // _BLOCK_SIZE) for a in arrivals
    ]
    return round(10 * sum(sizes) / len(sizes))


def measure(seeds: tuple[int, ...] = (1, 2, 3)) -> list[dict[str, object]]:
    """One row a kind of client and seed."""
    rows: list[dict[str, object]] = []
    for clients in KINDS:
        for seed in seeds:
            arrivals = workload(clients, seed)
            num_blocks = blocks_for_ten(arrivals)
            ten = run(arrivals, max_num_seqs=10, num_blocks=num_blocks)
            sixteen = run(arrivals, max_num_seqs=16, num_blocks=num_blocks)
            rows.append(
                {
                    "clients": clients,
                    "seed": seed,
                    "num_blocks": num_blocks,
                    "ratio": sixteen.tokens_per_s / ten.tokens_per_s,
                    "replayed_share": sixteen.replayed_share,
                    "at_10": asdict(ten),
                    "at_16": asdict(sixteen),
                }
            )
    return rows


def print_rows(rows: list[dict[str, object]]) -> None:
    for row in rows:
        at_10, at_16 = row["at_10"], row["at_16"]
        assert isinstance(at_10, dict) and isinstance(at_16, dict)
        print(
            f"{row['clients']:16} seed {row['seed']}  {row['num_blocks']} blocks  "
            f"ratio {row['ratio']:.3f}  replayed {row['replayed_share']:.3%}  "
            f"preemptions {at_10['num_preemptions']}, {at_16['num_preemptions']}  "
            f"running {at_10['mean_running']:.1f}, {at_16['mean_running']:.1f}"
        )


if __name__ == "__main__":
    print_rows(measure())
