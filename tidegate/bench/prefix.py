"""`tidegate bench prefix`: what a hit in the prefix cache saves of the time to first token.

One request at a time: a prompt with a fresh 480-token prefix (cold), then one with the same prefix and another tail
(hit). The ratio is the median over pairs of cold / hit.
"""

from __future__ import annotations

import random
from statistics import median
from typing import Any

from tidegate.bench.machine import describe_machine, machine_line
from tidegate.bench.report import check_writable, console_for, plain_table, write_json
from tidegate.clock import RealClock
from tidegate.config import load_config
from tidegate.engine.engine import Engine
from tidegate.executor.base import Executor
from tidegate.models.load import resolve_model
from tidegate.request import Request, RequestOutput, SamplingParams
from tidegate.worker.build import build_engine, build_executor
from tidegate.worker.loop import EngineLoop, settle_garbage_collection
from tidegate.worker.messages import FromWorker, StepReport, Submit, ToWorker

NUM_PREFIX_TOKENS = 480
NUM_PAIRS = 20
MIN_RATIO = 5.0
_TAILS = (8, 16, 24, 32)
_WARM_UP_PAIRS = 2


def run(json_path: str | None = None, *, num_pairs: int = NUM_PAIRS) -> int:
    """Returns the exit code: 1 when a hit saves less than it should."""
    check_writable(json_path)
    console = console_for(json_path)
    machine = describe_machine()
    console.print(machine_line(machine), soft_wrap=True)
    config = load_config()
    with console.status("loading"):
        executor = build_executor(resolve_model(config.model.model), config)
        engine = build_engine(executor, config)
    settle_garbage_collection()
    probe = _Probe(engine, executor)
    rng = random.Random(0)
    with console.status("measuring"):
        pairs = [_pair(probe, rng, _TAILS[place % len(_TAILS)]) for place in range(_WARM_UP_PAIRS + num_pairs)]
    pairs = pairs[_WARM_UP_PAIRS:]
    ratio = median(pair["cold_ms"] / pair["hit_ms"] for pair in pairs)
    rows = [
        (
            f"tail of {tail} tokens",
            f"{median(pair['cold_ms'] for pair in pairs if pair['tail'] == tail):.1f}",
            f"{median(pair['hit_ms'] for pair in pairs if pair['tail'] == tail):.1f}",
            f"{median(pair['cold_ms'] / pair['hit_ms'] for pair in pairs if pair['tail'] == tail):.1f}",
        )
        for tail in sorted({pair["tail"] for pair in pairs})
    ]
    console.print(
        plain_table(f"TTFT, {NUM_PREFIX_TOKENS}-token prefix", ("", "cold ms", "hit ms", "ratio"), rows),
        f"median of {len(pairs)} pairs: [bold]{ratio:.1f}[/bold] times faster on a hit",
    )
    write_json({"ratio": round(ratio, 3), "pairs": pairs, "machine": machine}, json_path)
    return 0 if ratio >= MIN_RATIO else 1


def _pair(probe: _Probe, rng: random.Random, num_tail_tokens: int) -> dict[str, Any]:
    def tokens(num: int) -> list[int]:
        return [rng.randrange(1_000, probe.vocab_size) for _ in range(num)]

    prefix = tokens(NUM_PREFIX_TOKENS)
    cold_s, _ = probe.ttft(prefix + tokens(num_tail_tokens))
    hit_s, num_cached = probe.ttft(prefix + tokens(num_tail_tokens))
    if num_cached < NUM_PREFIX_TOKENS // 2:
        raise RuntimeError(f"only {num_cached} tokens of a {NUM_PREFIX_TOKENS}-token prefix were found in the cache")
    return {
        "tail": num_tail_tokens,
        "cold_ms": round(cold_s * 1e3, 3),
        "hit_ms": round(hit_s * 1e3, 3),
        "cached_tokens": num_cached,
    }


class _Probe:
    """Sends one short request through the engine loop and waits for its end. It is the loop's transport itself."""

    def __init__(self, engine: Engine, executor: Executor) -> None:
        self.vocab_size = engine.info.vocab_size
        self._clock = RealClock()
        self._loop = EngineLoop(engine, executor, self, self._clock)
        self._inbox: list[ToWorker] = []
        self._outputs: list[RequestOutput] = []
        self._num_sent = 0

    def ttft(self, prompt_token_ids: list[int]) -> tuple[float, int]:
        """Seconds to the first token, and how many prompt tokens were cached."""
        self._num_sent += 1
        self._outputs = []
        start_s = self._clock.now()
        params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        request = Request(
            request_id=f"p{self._num_sent}",
            prompt_token_ids=prompt_token_ids,
            params=params,
            max_tokens=2,
            seed=0,
            arrival_s=start_s,
        )
        self._inbox.append(Submit(request))
        while not any(output.finish_reason for output in self._outputs):
            self._loop.turn()
        first = self._outputs[0]
        if first.prefill is None:
            raise RuntimeError(f"the request failed: {first.error}")
        return first.time_s - start_s, first.prefill.num_cached_tokens

    def receive(self, timeout_s: float) -> list[ToWorker]:
        messages, self._inbox = self._inbox, []
        return messages

    def send(self, message: FromWorker) -> None:
        if isinstance(message, StepReport):
            self._outputs += message.outputs
