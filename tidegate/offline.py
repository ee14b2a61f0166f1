"""LLM: the engine in this process, without a server.

    llm = LLM("smollm2-135m", kv_memory="512MiB")
    for output in llm.generate(["The sea", "The moon"], SamplingParams(max_tokens=32)):
        print(output.text)

Owns: turning prompts into Requests, and outputs into answers. The engine loop is the worker's own, with two lists
instead of a wire. Invariant: when a call returns or raises (Ctrl-C too), the engine is empty.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Self, cast

from tidegate.clock import RealClock
from tidegate.config import ConfigError, load_config
from tidegate.executor.base import ExecutorInfo
from tidegate.models.load import resolve_model
from tidegate.request import FinishReason, InvalidRequest, Request, RequestOutput, SamplingParams, TokenLogprobs
from tidegate.text.output_text import ChoiceText
from tidegate.worker.build import build_engine, build_executor, load_text
from tidegate.worker.loop import EngineLoop
from tidegate.worker.messages import Cancel, FromWorker, StepReport, Submit, ToWorker

Message = Mapping[str, Any]
Prompt = str | Sequence[int]
_SEED_BITS = 62  # so that seed + n never leaves 64


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts of tokens, as the API reports them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class ChoiceOutput:
    """One answer. `logprobs` is parallel to `token_ids` when asked for. `error` goes with FinishReason.ERROR."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[TokenLogprobs] | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Output:
    """What became of one prompt: `params.n` choices. The short names are those of the first one."""

    prompt_token_ids: list[int]
    choices: list[ChoiceOutput]
    usage: Usage
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.choices[0].finish_reason

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        return self.choices[0].logprobs


class LLM:
    """One model, loaded. Not thread-safe."""

    def __init__(self, model: str = "smollm2-135m", *, progress: bool = True, **settings: Any) -> None:
        """`settings` are the flags of `tidegate serve`, with _ for -. Raises ConfigError."""
        try:
            config = load_config(None, {"model": model, **settings})
        except KeyError as error:
            raise ConfigError(f"unknown setting {error}") from None
        source = resolve_model(config.model.model, progress=progress)
        self.tokenizer, self.chat_template = load_text(source)
        self._executor = build_executor(source, config)
        self._engine = build_engine(self._executor, config)
        self._stop_token_ids = source.stop_token_ids or self.tokenizer.eos_ids
        self._clock = RealClock()
        self._transport = _Lists()
        self._loop = EngineLoop(self._engine, self._executor, self._transport, self._clock)
        self._request_ids = itertools.count()
        self._progress = progress

    @property
    def max_model_len(self) -> int:
        return self._engine.info.max_model_len

    @property
    def info(self) -> ExecutorInfo:
        """What is computed with: precisions, KV blocks, vocabulary."""
        return self._engine.info

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[Output]:
        """Continue each prompt (text or token ids; one or many). One Output a prompt, in order.

        `params` is for all, or one a prompt. Raises InvalidRequest before anything is computed.
        """
        return self._run([self._prompt_ids(prompt) for prompt in _as_list(prompts)], params, progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[Output]:
        """Answer one conversation, or many. As generate otherwise."""
        prompts = [self.chat_template.encode(conversation) for conversation in _conversations(messages)]
        return self._run(prompts, params, progress)

    def close(self) -> None:
        self._executor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, param="prompts")
        try:
            token_ids = [operator.index(token_id) for token_id in prompt]
        except TypeError:
            raise InvalidRequest("a prompt must be a text or a list of token ids", param="prompts") from None
        vocab_size = self._engine.info.vocab_size
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                raise InvalidRequest(f"token id {token_id} is outside the vocabulary of {vocab_size}", param="prompts")
        return token_ids

    def _run(
        self,
        prompts: list[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        progress: bool | None,
    ) -> list[Output]:
        every = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(prompts)
        if len(every) != len(prompts):
            raise InvalidRequest(f"{len(every)} params for {len(prompts)} prompts", param="params")
        requests = [self._request(prompt, one) for prompt, one in zip(prompts, every, strict=True)]
        answers = {request.request_id: _Answer(request, self._choice_texts(request)) for request in requests}
        with _progress_bar(len(answers), self._progress if progress is None else progress) as report:
            self._compute(answers, report)
        return [answer.output() for answer in answers.values()]

    def _request(self, prompt_token_ids: list[int], params: SamplingParams) -> Request:
        """Raises InvalidRequest for what cannot fit."""
        num_prompt_tokens = len(prompt_token_ids)
        room = self.max_model_len - num_prompt_tokens
        if not num_prompt_tokens:
            raise InvalidRequest("a prompt is empty", param="prompts")
        if room < (params.max_tokens or 1):
            raise InvalidRequest(
                f"{num_prompt_tokens} prompt tokens and {params.max_tokens or 1} more do not fit the model's "
                f"{self.max_model_len}",
                param="max_tokens" if room >= 1 else "prompts",
                code="context_length_exceeded",
            )
        ids = params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, *self._stop_token_ids)
        return Request(
            request_id=f"offline-{next(self._request_ids)}",
            prompt_token_ids=prompt_token_ids,
            params=params,
            max_tokens=params.max_tokens or room,
            seed=random.getrandbits(_SEED_BITS) if params.seed is None else params.seed & (2**_SEED_BITS - 1),
            arrival_s=self._clock.now(),
            stop_token_ids=tuple(dict.fromkeys(ids)),
        )

    def _choice_texts(self, request: Request) -> list[ChoiceText]:
        params = request.params
        return [
            ChoiceText(
                self.tokenizer,
                stops=params.stop,
                include_stop=params.include_stop_str_in_output,
                stop_token_ids=request.stop_token_ids,
                min_tokens=params.min_tokens,
            )
            for _ in range(params.n)
        ]

    def _compute(self, answers: dict[str, _Answer], report: Callable[[int, int], None]) -> None:
        """Turn the loop until every answer is there; whatever happens, leave nothing in the engine."""
        running = dict(answers)
        self._transport.inbox += [Submit(answer.request) for answer in answers.values()]
        num_tokens = 0
        try:
            with _deferred_interrupt() as interrupted:
                while running:
                    self._loop.turn()
                    for output in self._transport.take_outputs():
                        num_tokens += len(output.token_ids)
                        answer = running.get(output.request_id)
                        if answer is not None and answer.take(output):
                            del running[output.request_id]
                            self._transport.inbox.append(Cancel(output.request_id))  # a stop string ends it here first
                    report(len(answers) - len(running), num_tokens)
                    if interrupted.is_set():
                        raise KeyboardInterrupt
        finally:
            self._transport.inbox += [Cancel(request_id) for request_id in running]
            while self._engine.has_work or self._transport.inbox:
                self._loop.turn()
            self._transport.take_outputs()


class _Lists:
    """The transport of a loop that is turned by hand: it never waits."""

    def __init__(self) -> None:
        self.inbox: list[ToWorker] = []
        self._outputs: list[RequestOutput] = []

    def receive(self, timeout_s: float) -> list[ToWorker]:
        messages, self.inbox = self.inbox, []
        return messages

    def send(self, message: FromWorker) -> None:
        if isinstance(message, StepReport):
            self._outputs += message.outputs

    def take_outputs(self) -> list[RequestOutput]:
        outputs, self._outputs = self._outputs, []
        return outputs


@dataclass(slots=True)
class _OpenChoice:
    text: ChoiceText
    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str = ""

    def take(self, output: RequestOutput) -> None:
        if self.finish_reason is not None:
            return
        delta = self.text.push(output.token_ids)
        self.pieces.append(delta.text)
        self.token_ids += output.token_ids[: delta.num_tokens_used]
        self.logprobs += (output.logprobs or [])[: delta.num_tokens_used]
        self.error = output.error
        if delta.stop is not None:
            self.finish_reason = FinishReason.STOP
        elif output.finish_reason is not None:
            rest = self.text.finish()
            self.pieces.append(rest.text)
            self.finish_reason = FinishReason.STOP if rest.stop is not None else output.finish_reason


class _Answer:
    """What a request has brought so far."""

    def __init__(self, request: Request, texts: list[ChoiceText]) -> None:
        self.request = request
        self._choices = [_OpenChoice(text) for text in texts]
        self._num_cached_tokens = 0
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None

    def take(self, output: RequestOutput) -> bool:
        """Whether all choices have ended."""
        if output.prefill is not None:
            self._num_cached_tokens = output.prefill.num_cached_tokens
        if output.prompt_logprobs is not None:
            self._prompt_logprobs = output.prompt_logprobs
        # A fault before the choices have parted comes once, for all of them.
        takers = self._choices if output.finish_reason is FinishReason.ERROR else [self._choices[output.index]]
        for choice in takers:
            choice.take(output)
        return all(choice.finish_reason is not None for choice in self._choices)

    def output(self) -> Output:
        choices = [
            ChoiceOutput(
                index=index,
                text="".join(choice.pieces),
                token_ids=choice.token_ids,
                finish_reason=choice.finish_reason or FinishReason.ABORT,
                logprobs=choice.logprobs if self.request.params.logprobs is not None else None,
                error=choice.error,
            )
            for index, choice in enumerate(self._choices)
        ]
        num_output_tokens = sum(len(choice.token_ids) for choice in choices)
        usage = Usage(self.request.num_prompt_tokens, num_output_tokens, self._num_cached_tokens)
        return Output(self.request.prompt_token_ids, choices, usage, self._prompt_logprobs)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, a text or token ids, is a list of one."""
    if isinstance(prompts, str) or (len(prompts) > 0 and all(isinstance(part, int) for part in prompts)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Sequence[Message]]:
    if all(isinstance(message, Mapping) for message in messages):
        return [cast("Sequence[Message]", messages)]
    return list(cast("Sequence[Sequence[Message]]", messages))


@contextlib.contextmanager
def _deferred_interrupt() -> Iterator[threading.Event]:
    """A Ctrl-C sets the event instead of breaking into the middle of a step. Only the main thread gets any."""
    interrupted = threading.Event()
    is_ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if not is_ours:
        yield interrupted
        return

    def note(number: int, frame: FrameType | None) -> None:
        interrupted.set()

    signal.signal(signal.SIGINT, note)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def _progress_bar(num_prompts: int, show: bool) -> Iterator[Callable[[int, int], None]]:
    """Yields a function to be told (prompts done, tokens produced). Shown on a terminal only."""
    if not show or not sys.stderr.isatty():
        yield lambda num_done, num_tokens: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("generating"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:,.0f} tokens/s"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("generating", total=num_prompts, rate=0.0)
        started = bar.get_time()

        def report(num_done: int, num_tokens: int) -> None:
            bar.update(task, completed=num_done, rate=num_tokens / max(bar.get_time() - started, 1e-6))

        yield report
