"""POST /v1/chat/completions and /v1/completions: from an Exchange to an answer, streamed or whole.

The life of one HTTP request:
    read body -> parse -> tokenize -> submit -> (first token) status, headers, opening -> deltas -> finish -> usage, end
Until the first token nothing is sent, so that a refusal in the queue still has its own status. From the body on, the
client is watched: when it goes away, the generation is closed at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import msgspec

from tidegate.api.body import parse
from tidegate.api.chat_format import ChatFormat
from tidegate.api.choices import Answers, Choice, Delta
from tidegate.api.completion_format import CompletionFormat
from tidegate.api.errors import ADMISSION_HEADER
from tidegate.api.exchange import Exchange
from tidegate.api.formats import DONE, AnswerFormat
from tidegate.api.generation import Batch, Generation
from tidegate.api.promises import Promises, promises
from tidegate.api.prompts import Prompt, Prompts
from tidegate.api.schemas import ChatBody, CompletionBody, SamplingFields
from tidegate.api.service import Outcome, Refused, Service
from tidegate.clock import Clock
from tidegate.request import InvalidRequest, Request, SamplingParams
from tidegate.text.conversation import ConversationStart

STREAM_BUFFER_LIMIT = 64 * 2**10
"""Bytes of a stream that wait for a client that is behind, on top of what the connection buffers."""
_SSE_HEADERS = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"))
_FROM_BEST = ("admit", "observe", "queue", "downgrade")


@dataclass(slots=True)
class Job:
    """What a body asks for."""

    requests: list[Request]
    format: AnswerFormat
    streams: bool
    with_usage: bool
    continues_text: bool
    timeout_s: float | None = None
    conversation: ConversationStart | None = None


async def chat_job(data: bytes, exchange: Exchange, prompts: Prompts, service: Service) -> Job:
    """Raises InvalidRequest, and Refused when there is no need to tokenize first."""
    body, ignored = parse(data, ChatBody)
    _name_ignored(exchange, ignored)
    prompts.check_model(body.model)
    streams, with_usage = _stream_options(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    if body.max_completion_tokens is not None and body.max_tokens is not None:
        raise InvalidRequest("give max_completion_tokens or max_tokens, not both", param="max_tokens")
    params = body.sampling_params(
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        bad_words=prompts.bad_words(body.bad_words or ()),
    )
    promised = promises(body, service.tier_names, exchange.tenant)
    _refuse_early(body, params, promised, exchange, prompts, service)
    prompt = await prompts.of_chat(body, exchange.tenant)
    answer_format = ChatFormat(
        response_id=exchange.request_id,
        model=prompts.model.name,
        tokenizer=prompts.model.tokenizer,
        with_usage=with_usage,
        with_logprobs=bool(body.logprobs),
    )
    requests = _requests(body, params, [prompt], promised, exchange, prompts)
    return Job(requests, answer_format, streams, with_usage, False, promised.timeout_s, prompt.conversation)


async def completion_job(data: bytes, exchange: Exchange, prompts: Prompts, service: Service) -> Job:
    """Raises InvalidRequest, and Refused when there is no need to tokenize first."""
    body, ignored = parse(data, CompletionBody)
    _name_ignored(exchange, ignored)
    prompts.check_model(body.model)
    streams, with_usage = _stream_options(body)
    drops_output = body.max_tokens == 0
    if drops_output and not body.echo:
        raise InvalidRequest("max_tokens 0 needs echo: true", param="max_tokens")
    params = body.sampling_params(
        max_tokens=1 if drops_output else body.max_tokens,
        logprobs=body.logprobs,
        bad_words=prompts.bad_words(body.bad_words or ()),
    )
    if body.echo and body.logprobs is not None:
        params = msgspec.structs.replace(params, prompt_logprobs=max(body.logprobs, body.prompt_logprobs or 0))
    promised = promises(body, service.tier_names, exchange.tenant)
    _refuse_early(body, params, promised, exchange, prompts, service)
    texts = await prompts.of_completion(body)
    requests = _requests(body, params, texts, promised, exchange, prompts)
    echoes = [prompts.with_text(prompt) for prompt in texts] if body.echo else None
    answer_format = CompletionFormat(
        response_id=exchange.request_id,
        model=prompts.model.name,
        tokenizer=prompts.model.tokenizer,
        with_usage=with_usage,
        with_logprobs=body.logprobs is not None,
        with_prompt_logprobs=body.prompt_logprobs is not None,
        echoes=echoes,
        num_choices=params.n,
        drops_output=drops_output,
    )
    return Job(requests, answer_format, streams, with_usage, True, promised.timeout_s)


def _refuse_early(
    body: ChatBody | CompletionBody,
    params: SamplingParams,
    promised: Promises,
    exchange: Exchange,
    prompts: Prompts,
    service: Service,
) -> None:
    """A refusal that does not depend on what a long prompt's tokens are comes before they are computed."""
    least = prompts.least_request(body, params, promised, exchange)
    if least is not None:
        service.refuse_early(least)


def _requests(
    body: SamplingFields,
    params: SamplingParams,
    texts: list[Prompt],
    promised: Promises,
    exchange: Exchange,
    prompts: Prompts,
) -> list[Request]:
    return prompts.requests(
        body,
        params,
        texts,
        promised=promised,
        tenant=exchange.tenant,
        request_id=exchange.request_id,
        arrival_s=exchange.arrival_s,
    )


def _stream_options(body: SamplingFields) -> tuple[bool, bool]:
    """Whether to stream, and whether a usage chunk ends the stream."""
    streams = bool(body.stream)
    if body.stream_options is not None and not streams:
        raise InvalidRequest("stream_options is only allowed with stream: true", param="stream_options")
    if streams and body.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs is not available with stream: true", param="prompt_logprobs")
    return streams, bool(body.stream_options is not None and body.stream_options.include_usage)


def _name_ignored(exchange: Exchange, ignored: list[str]) -> None:
    """Names that are safe in a header; a hostile body may hold any number of any names."""
    names = [name for name in ignored[:32] if name.isascii() and name.isprintable() and len(name) <= 64]
    if names:
        exchange.extra_headers.append((b"x-tidegate-ignored", ", ".join(names).encode()))


async def answer(exchange: Exchange, job: Job, prompts: Prompts, service: Service, clock: Clock) -> None:
    """Run a job. Raises Refused while nothing has been sent; later it ends the stream with an error event."""
    generation = Generation(service, job.requests, tokenized_s=clock.now())
    exchange.on_end = generation.close
    if job.timeout_s is not None:
        generation.end_after(exchange.arrival_s + job.timeout_s - clock.now())
    outcome: Outcome | list[Outcome] = Outcome.ERROR
    try:
        answers = Answers(
            job.requests,
            prompts.model.tokenizer,
            continues_text=job.continues_text,
            on_finished=_rememberer(job, prompts),
        )
        respond = _stream if job.streams else _respond_whole
        await respond(exchange, job, generation, answers, lambda: generation.first_byte_sent(clock.now()))
        outcome = answers.outcomes([served is not None and served.is_clamped for served in generation.served])
    except Refused as refused:
        outcome = refused.outcome
        if not exchange.is_started:
            raise
        if not exchange.is_gone:
            await exchange.write(b"data: " + refused.body() + b"\n\n", more=False)
    finally:
        generation.finish(Outcome.CANCELLED if exchange.is_gone and outcome is Outcome.ERROR else outcome)


def _rememberer(job: Job, prompts: Prompts) -> Callable[[Choice], None] | None:
    start = job.conversation
    return None if start is None else lambda choice: prompts.remember(start, choice.text, choice.token_ids)


async def _respond_whole(
    exchange: Exchange, job: Job, generation: Generation, answers: Answers, on_first_byte: Callable[[], None]
) -> None:
    sums = {choice.index: Delta() for choice in answers.all_choices}
    texts: dict[int, list[str]] = {index: [] for index in sums}
    async with aclosing(generation.batches()) as batches:
        async for batch in batches:
            for place, output in batch:
                choice, delta = answers.push(place, output)
                texts[choice.index].append(delta.text)
                sums[choice.index].logprobs.extend(delta.logprobs)
                sums[choice.index].text_offsets.extend(delta.text_offsets)
            _close_finished(generation, answers, batch)
    for choice, delta in _cut_short(exchange, generation, answers):
        texts[choice.index].append(delta.text)
    _check_complete(exchange, answers)
    for index, total in sums.items():
        total.text = "".join(texts[index])
    headers = _tell_served(job, generation)
    body = job.format.whole(answers, list(sums.values()))
    on_first_byte()
    await exchange.respond(200, body, headers)


async def _stream(
    exchange: Exchange, job: Job, generation: Generation, answers: Answers, on_first_byte: Callable[[], None]
) -> None:
    pending = bytearray()
    async with aclosing(generation.batches()) as batches:
        async for batch in batches:
            headers = () if exchange.is_started else _tell_served(job, generation)
            chunks = b"".join([job.format.chunk(*answers.push(place, output)) for place, output in batch])
            _close_finished(generation, answers, batch)
            if not exchange.is_started:
                await exchange.start(200, (*_SSE_HEADERS, *headers))
                await exchange.write(job.format.opening(answers) + chunks, more=True)
                on_first_byte()
                continue
            pending += chunks
            if exchange.is_congested:
                if len(pending) > STREAM_BUFFER_LIMIT:
                    await exchange.abort()
                    raise Refused(Outcome.SLOW_READER, "the client does not read its stream")
            elif pending:
                await exchange.write(bytes(pending), more=True)
                pending.clear()
    pending += b"".join([job.format.chunk(*cut) for cut in _cut_short(exchange, generation, answers)])
    _check_complete(exchange, answers)
    if job.with_usage:
        pending += job.format.usage_chunk(job.format.usage(answers))
    await exchange.write(bytes(pending + DONE), more=False)


def _tell_served(job: Job, generation: Generation) -> Sequence[tuple[bytes, bytes]]:
    """The client sees how it is served: the tier in the body, the decision in a header. Of several prompts, the one
    that got least of what was asked for."""
    all_served = [served for served in generation.served if served is not None]
    if not all_served:
        job.format.serve_in(job.requests[0].tier)
        return ()
    told = max(all_served, key=lambda served: _FROM_BEST.index(served.decision.partition(";")[0]))
    job.format.serve_in(told.tier)
    return ((ADMISSION_HEADER, told.decision.encode()),)


def _cut_short(exchange: Exchange, generation: Generation, answers: Answers) -> list[tuple[Choice, Delta]]:
    """The ends of the choices whose time limit ended them. Raises Refused when there is no token to show for it."""
    if not generation.is_timed_out or exchange.is_gone or exchange.is_cut_off:
        return []
    if answers.num_output_tokens == 0:
        raise Refused(Outcome.TIMEOUT, "no token was there when timeout_s had passed")
    return answers.cut()


def _close_finished(generation: Generation, answers: Answers, batch: Batch) -> None:
    """A Request whose choices have all ended, in the engine or by a stop string, holds nothing any more."""
    for place in {place for place, _ in batch}:
        if answers.is_finished(place):
            generation.close_stream(place)


def _check_complete(exchange: Exchange, answers: Answers) -> None:
    """Raises Refused when the outputs ended before the answers did: the client went away, or a fault of ours."""
    if exchange.is_gone:
        raise exchange.gone()
    if exchange.is_cut_off:
        raise Refused(Outcome.DRAINING, "the server is shutting down; the answer is not complete")
    if not all(choice.is_finished for choice in answers.all_choices):
        raise Refused(Outcome.ERROR, "the answer ended before it was complete")
