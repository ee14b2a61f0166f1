"""A Service without an engine: it answers with a fixed text, or with what a test emits, and remembers everything.

Its tokenizer is a real one over the 256 bytes, so that one byte is one token and token ids can be read off a text.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tidegate.api.app import Api
from tidegate.api.server import Server, bind, run
from tidegate.api.service import Health, HealthReason, Outcome, OutputStream, Refused, Served, ServedModel
from tidegate.clock import RealClock
from tidegate.config import ServerConfig
from tidegate.request import FinishReason, PrefillTimes, Request, RequestOutput, TokenLogprobs
from tidegate.text.chat_template import ChatTemplate
from tidegate.text.token_bytes import _byte_alphabet
from tidegate.text.tokenizer import Tokenizer
from tidegate.text.tokenizer_spec import spec_from_metadata

EOS_ID = 256
START_ID = 257
VOCAB_SIZE = 258
WAIT_S = 10.0
"""Long enough that only a hang reaches it."""


def byte_tokenizer() -> Tokenizer:
    """Token id b is byte b; 256 ends an answer, 257 starts a chat message."""
    names = {byte: char for char, byte in _byte_alphabet().items()}
    return Tokenizer(
        spec_from_metadata(
            {
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.pre": "gpt-2",
                "tokenizer.ggml.tokens": [*(names[byte] for byte in range(256)), "<|im_end|>", "<|im_start|>"],
                "tokenizer.ggml.token_type": [1] * 256 + [3, 3],
                "tokenizer.ggml.merges": [],
                "tokenizer.ggml.eos_token_id": EOS_ID,
            },
            source="the test's tokenizer",
        )
    )


class FakeStream(OutputStream):
    """Outputs go in from any thread and come out on the server's loop."""

    def __init__(self, request: Request, loop: asyncio.AbstractEventLoop) -> None:
        self.request = request
        self.is_closed = threading.Event()
        self._loop = loop
        self._outputs: list[RequestOutput] = []
        self._failure: Refused | None = None
        self._wake = asyncio.Event()
        self._num_open = request.params.n
        self.served_as: Served | None = None

    @property
    def served(self) -> Served | None:
        return self.served_as

    def emit(self, tokens: str | bytes | list[int], finish: FinishReason | None = None, *, index: int = 0) -> None:
        """What one step brought choice `index`."""
        data = tokens.encode() if isinstance(tokens, str) else tokens
        self._loop.call_soon_threadsafe(self._take, self._output(list(data), finish, index))

    def fail(self, refused: Refused) -> None:
        def take() -> None:
            self._failure = refused
            self._wake.set()

        self._loop.call_soon_threadsafe(take)

    def _output(self, token_ids: list[int], finish: FinishReason | None, index: int) -> RequestOutput:
        params = self.request.params
        output = RequestOutput(self.request.request_id, index, token_ids, 0.0, finish)
        if params.logprobs is not None:
            output.logprobs = [logprobs_of(token_id, params.logprobs) for token_id in token_ids]
        return output

    def _take(self, output: RequestOutput) -> None:
        if output.index == 0 and output.prefill is None and not self._outputs:
            output.prefill = PrefillTimes(0.0, 0.0, 0.0, 0.0, 0.0, num_cached_tokens=3)
            wanted = self.request.params.prompt_logprobs
            if wanted is not None:
                ids = self.request.prompt_token_ids
                output.prompt_logprobs = [None, *(logprobs_of(token_id, wanted) for token_id in ids[1:])]
        self._outputs.append(output)
        self._wake.set()

    def answer(self, text: str) -> None:
        """The whole answer, a token at a time, to each choice: ends with EOS, or where max_tokens cuts it."""
        for index in range(self.request.params.n):
            token_ids = [*text.encode(), EOS_ID][: self.request.max_tokens]
            for token_id in token_ids[:-1]:
                self._take(self._output([token_id], None, index))
            ends = token_ids[-1] == EOS_ID and not self.request.params.ignore_eos
            self._take(self._output(token_ids[-1:], FinishReason.STOP if ends else FinishReason.LENGTH, index))

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> list[RequestOutput]:
        while not self._outputs:
            if self._failure is not None:
                raise self._failure
            if self.is_closed.is_set() or not self._num_open:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        outputs, self._outputs = self._outputs, []
        self._num_open -= sum(output.finish_reason is not None for output in outputs)
        return outputs

    def close(self) -> None:
        self.is_closed.set()
        self._wake.set()


def logprobs_of(token_id: int, num_top: int) -> TokenLogprobs:
    top = tuple(((token_id + place) % 256, -0.5 - place) for place in range(num_top))
    return TokenLogprobs(token_id, -0.5, top)


class FakeService:
    """`reply` answers at once; None leaves each stream to `on_submit`, and to the test that takes it (`next_stream`).

    The status of a response comes with the first token: a client that waits for it needs on_submit to emit one.
    """

    def __init__(self, *, max_model_len: int = 4096) -> None:
        tokenizer = byte_tokenizer()
        self._changed = threading.Condition()
        self._served = ServedModel(
            name="fake-model",
            max_model_len=max_model_len,
            vocab_size=VOCAB_SIZE,
            tokenizer=tokenizer,
            chat_template=ChatTemplate(tokenizer),
            eos_token_ids=(EOS_ID,),
            block_size=16,
            num_blocks=1024,
            created=1,
        )
        self.reset()

    def reset(self) -> None:
        """As new."""
        self.reply: str | None = "Hello, wörld!"
        self.on_submit: Callable[[FakeStream], None] | None = None
        self.refuse: Refused | None = None
        self.reason: HealthReason = "ready"
        self.requests: list[Request] = []
        self.least_requests: list[Request] = []
        self.served_as: Served | None = None
        self.outcomes: dict[str, Outcome] = {}
        self.milestones: dict[str, dict[str, float]] = {}
        self.served: ServedModel | None = self._served
        self._streams: list[FakeStream] = []

    @property
    def model(self) -> ServedModel | None:
        return self.served

    @property
    def tier_names(self) -> tuple[str, ...]:
        return ("priority", "default", "flex", "night")

    def refuse_early(self, request: Request) -> None:
        self.least_requests.append(request)
        if self.refuse is not None:
            raise self.refuse

    def submit(self, request: Request) -> FakeStream:
        if self.refuse is not None:
            raise self.refuse
        stream = FakeStream(request, asyncio.get_running_loop())
        stream.served_as = self.served_as
        if self.reply is not None:
            stream.answer(self.reply)
        if self.on_submit is not None:
            self.on_submit(stream)
        with self._changed:
            self.requests.append(request)
            self._streams.append(stream)
            self._changed.notify_all()
        return stream

    def health(self) -> Health:
        return Health(self.reason)

    def timeline(self, request_id: str) -> dict[str, Any] | None:
        return {"request_id": request_id} if request_id in self.outcomes else None

    def record(
        self,
        request_id: str,
        *,
        tokenized_s: float | None = None,
        first_byte_s: float | None = None,
        outcome: Outcome | None = None,
    ) -> None:
        with self._changed:
            milestones = self.milestones.setdefault(request_id, {})
            if tokenized_s is not None:
                milestones["tokenized_s"] = tokenized_s
            if first_byte_s is not None:
                milestones["first_byte_s"] = first_byte_s
            if outcome is not None:
                assert request_id not in self.outcomes, "an outcome is recorded once"
                self.outcomes[request_id] = outcome
            self._changed.notify_all()

    def next_stream(self) -> FakeStream:
        """The oldest stream that no test has taken yet; waits for it."""
        with self._changed:
            assert self._changed.wait_for(lambda: bool(self._streams), WAIT_S), "no request was submitted"
            return self._streams.pop(0)

    def wait_outcome(self, request_id: str) -> Outcome:
        with self._changed:
            assert self._changed.wait_for(lambda: request_id in self.outcomes, WAIT_S), "no outcome was recorded"
            return self.outcomes[request_id]

    def wait_outcomes(self, count: int) -> list[Outcome]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.outcomes) >= count, WAIT_S), str(self.outcomes)
            return list(self.outcomes.values())


class RunningServer:
    """A real server on a thread of its own."""

    def __init__(self, service: FakeService, config: ServerConfig) -> None:
        self.service = service
        self.api = Api(service, config, RealClock(), lambda: (b"tidegate_up 1\n", "text/plain; version=0.0.4"))
        listener = bind(config)
        self.port: int = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = Server(self.api, config, listener)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started = threading.Event()
        self.thread = threading.Thread(target=lambda: run(self._serve()), name="server")
        self.thread.start()
        assert self._started.wait(WAIT_S)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self.server.serve(on_started=self._started.set, handles_signals=False)

    def call(self, function: Any) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(function)

    def stop(self) -> None:
        if self.thread.is_alive():
            self.call(self.server.begin_drain)
            self.thread.join(WAIT_S)
        assert not self.thread.is_alive(), "the server did not stop"


@contextmanager
def serving(service: FakeService | None = None, **config: Any) -> Iterator[RunningServer]:
    server = RunningServer(service or FakeService(), ServerConfig(port=0, **{"drain_timeout": 0.2, **config}))
    try:
        yield server
    finally:
        server.stop()
