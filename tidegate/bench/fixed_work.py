"""The fixed piece of work that engines and servers are compared on, and the loop that feeds it to our engine.

Owns: 48 prompts of 64-512 tokens with answers of exactly 32-128 tokens, from one seed; and FedLoop, which keeps the
engine's slots full. The engine loop is the worker's own, with lists for a wire; the clock is real.

A slot that a step frees must not idle until the next request is handed over, so as many as there are slots wait inside
the engine, as the gate's look-ahead has a few wait in a worker. `max_num_seqs` caps what runs.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from tidegate.clock import Clock, RealClock
from tidegate.engine.engine import Engine
from tidegate.executor.base import Executor
from tidegate.metrics.load_snapshot import StepStats
from tidegate.request import FinishReason, Request, SamplingParams
from tidegate.worker.loop import EngineLoop
from tidegate.worker.messages import FromWorker, StepReport, Submit, ToWorker

SEED = 2
NUM_REQUESTS = 48
ONE_AT_A_TIME_EVERY = 4  # every fourth of the 48: 12
_FIRST_TOKEN_ID = 1000  # below are control tokens and single bytes


@dataclass(frozen=True, slots=True)
class FixedWork:
    """One request: its prompt, and how many tokens its answer has, no more and no fewer."""

    prompt_token_ids: list[int]
    num_output_tokens: int


def fixed_work(vocab_size: int, num_requests: int = NUM_REQUESTS, seed: int = SEED) -> list[FixedWork]:
    """Prompts share no prefix."""
    rng = random.Random(seed)
    first = min(_FIRST_TOKEN_ID, vocab_size // 2)
    return [
        FixedWork([rng.randrange(first, vocab_size) for _ in range(rng.randint(64, 512))], rng.randint(32, 128))
        for _ in range(num_requests)
    ]


def warm_up_work(vocab_size: int) -> list[FixedWork]:
    """Short, and unlike the work itself."""
    return [FixedWork(item.prompt_token_ids, 12) for item in fixed_work(vocab_size, num_requests=8, seed=SEED + 1)]


@dataclass(slots=True)
class Answered:
    """What became of one request. Times on the run's clock."""

    token_ids: list[int] = field(default_factory=list)
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    finish_reason: FinishReason | None = None
    error: str = ""

    @property
    def tpot_s(self) -> float:
        return (self.last_token_s - self.first_token_s) / max(1, len(self.token_ids) - 1)


@dataclass(slots=True)
class WorkRun:
    """One pass over the work. `busy_s` is the time in which the executor had a step; None where it cannot be told."""

    wall_s: float
    num_steps: int
    answers: list[Answered]
    busy_s: float | None = None

    @property
    def num_output_tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers)

    def figures(self) -> dict[str, float]:
        figures = {
            "tok_s": round(self.num_output_tokens / self.wall_s, 2),
            "tpot_ms": round(median(answer.tpot_s for answer in self.answers) * 1e3, 3),
            "wall_s": round(self.wall_s, 3),
            "steps": self.num_steps,
            "output_tokens": self.num_output_tokens,
        }
        if self.busy_s is not None:
            figures["busy_share"] = round(self.busy_s / self.wall_s, 4)
        return figures


class FedLoop:
    """Runs work through an engine whose max_num_seqs says how much at a time."""

    def __init__(self, engine: Engine, executor: Executor, clock: Clock | None = None) -> None:
        self._engine = engine
        self._executor = executor
        self._clock = clock or RealClock()
        self._num_runs = 0

    def run(self, work: Sequence[FixedWork]) -> WorkRun:
        """Raises RuntimeError when an answer is not what was asked for."""
        self._num_runs += 1
        start_s = self._clock.now()
        requests = [_request(f"{self._num_runs}-{place}", item, start_s) for place, item in enumerate(work)]
        feed = _Feed(requests, 2 * self._engine.scheduler.max_num_seqs)
        loop = EngineLoop(self._engine, self._executor, feed, self._clock)
        while not feed.is_done:
            loop.turn()
        wall_s = self._clock.now() - start_s
        answers = list(feed.answers.values())
        check_answers(work, answers)
        return WorkRun(wall_s, len(feed.steps), answers, sum(step.compute_s for step in feed.steps))


def check_answers(work: Sequence[FixedWork], answers: Sequence[Answered]) -> None:
    """Raises RuntimeError: a comparison of unequal work is none."""
    for place, (item, answer) in enumerate(zip(work, answers, strict=True)):
        if len(answer.token_ids) != item.num_output_tokens:
            raise RuntimeError(
                f"request {place} brought {len(answer.token_ids)} tokens, not {item.num_output_tokens}"
                + (f": {answer.error}" if answer.error else "")
            )


def _request(request_id: str, item: FixedWork, now: float) -> Request:
    params = SamplingParams(max_tokens=item.num_output_tokens, temperature=0.0, ignore_eos=True)
    return Request(
        request_id=request_id,
        prompt_token_ids=item.prompt_token_ids,
        params=params,
        max_tokens=item.num_output_tokens,
        seed=0,
        arrival_s=now,
    )


class _Feed:
    """The loop's transport: hands over the next request when one has ended, and keeps what comes back."""

    def __init__(self, requests: Iterable[Request], num_handed_over: int) -> None:
        self._waiting = list(requests)[::-1]
        self.answers = {request.request_id: Answered() for request in reversed(self._waiting)}
        self.steps: list[StepStats] = []
        self._num_open = len(self._waiting)
        self._inbox: list[ToWorker] = []
        for _ in range(min(num_handed_over, len(self._waiting))):
            self._hand_over()

    @property
    def is_done(self) -> bool:
        return self._num_open == 0

    def receive(self, timeout_s: float) -> list[ToWorker]:
        messages, self._inbox = self._inbox, []
        return messages

    def send(self, message: FromWorker) -> None:
        if not isinstance(message, StepReport):
            return
        if message.stats is not None:
            self.steps.append(message.stats)
        for output in message.outputs:
            answer = self.answers[output.request_id]
            if not answer.token_ids:
                answer.first_token_s = output.time_s
            answer.token_ids += output.token_ids
            answer.last_token_s = output.time_s
            if output.finish_reason is not None:
                answer.finish_reason = output.finish_reason
                answer.error = output.error
                self._num_open -= 1
                if self._waiting:
                    self._hand_over()

    def _hand_over(self) -> None:
        self._inbox.append(Submit(self._waiting.pop()))
