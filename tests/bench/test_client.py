"""The load generator's client: what it reads does not depend on how the bytes are cut, and it raises for nothing."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bench.fake_server import (
    completion_events,
    event,
    fake_server,
    refuses,
    sends,
    sends_in_pieces,
    stream_bytes,
)
from tidegate.bench.client import CallRecord, Endpoint, _ChunkDecoder, call
from tidegate.config import ConfigError


def called(*answers: object, **options: object) -> CallRecord:
    async def scenario() -> CallRecord:
        async with fake_server(*answers) as (_, endpoint):  # type: ignore[arg-type]
            return await call(endpoint, endpoint.head("POST", "/v1/completions", 2) + b"{}", **options)  # type: ignore[arg-type]

    return asyncio.run(scenario())


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=8), st.lists(st.integers(0, 400), max_size=12))
def test_chunks_are_read_however_they_are_cut(contents: list[bytes], cuts: list[int]) -> None:
    data = b"".join(b"%x;ext=1\r\n%b\r\n" % (len(one), one) for one in contents) + b"0\r\n\r\n"
    decoder, read, is_over = _ChunkDecoder(), b"", False
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for start, end in itertools.pairwise(places):
        assert not is_over or start >= len(data) - 4  # the very last line break may come on its own
        if not is_over:
            piece, is_over = decoder.feed(data[start:end])
            read += piece
    assert (read, is_over) == (b"".join(contents), True)


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_a_stream_is_read_whole(size: int) -> None:
    record = called(sends_in_pieces(stream_bytes(completion_events(4, cached=3)), size), keep_text=True)
    assert (record.status, record.is_complete, record.error) == (200, True, "")
    assert (record.text, len(record.event_times), record.num_output_tokens) == ("t0 t1 t2 t3 ", 4, 4)
    assert (record.num_prompt_tokens, record.num_cached_tokens, record.finish_reason) == (5, 3, "length")
    times = [record.connect_s, record.sent_s, record.answered_s, *record.event_times, record.ended_s]
    assert times == sorted(times)


def test_the_servers_own_count_of_tokens_wins_over_the_number_of_events() -> None:
    assert called(sends(stream_bytes(completion_events(2, num_counted=5)))).num_output_tokens == 5


def test_a_chat_opens_with_a_role_that_is_no_output() -> None:
    events = [
        b'data: {"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n',
        b'data: {"choices":[{"delta":{"content":"a"},"finish_reason":null}],"service_tier":"flex"}\n\n',
        b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n',
        b"data: [DONE]\n\n",
    ]
    record = called(sends(stream_bytes(events)), keep_text=True)
    assert (record.text, len(record.event_times), record.finish_reason) == ("a", 1, "stop")
    assert record.service_tier == "flex"


def test_a_refusal_keeps_its_status_headers_and_body() -> None:
    record = called(refuses("429 Too Many Requests", b'{"error":{}}', b"Retry-After: 7\r\n"))
    assert (record.status, record.headers["retry-after"], record.body) == (429, "7", b'{"error":{}}')
    assert not record.is_complete
    assert record.error == ""


def test_hanging_up_ends_the_call_at_that_token() -> None:
    async def scenario() -> tuple[CallRecord, int]:
        async def endless(writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
            while True:
                writer.write(event("x"))
                await writer.drain()
                await asyncio.sleep(0)

        async with fake_server(endless) as (fake, endpoint):
            record = await call(endpoint, endpoint.head("POST", "/", 0), hang_up_after=3)
            while not fake.num_hang_ups:
                await asyncio.sleep(0)
            return record, fake.num_hang_ups

    record, num_hang_ups = asyncio.run(scenario())
    assert (len(record.event_times), record.has_hung_up, num_hang_ups) == (3, True, 1)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (sends(stream_bytes(completion_events(2))[:-60]), "the connection broke off"),
        (sends(stream_bytes([event("a")])), "the stream ended without [DONE]"),
        (sends(stream_bytes([event("a"), b'data: {"error":{"message":"worker died"}}\n\n'])), "worker died"),
        (sends(b"nonsense\r\n\r\n"), "not an answer that can be read"),
        (sends(b""), "the connection broke off"),
        (sends(stream_bytes([b"data: {broken\n\n"])), "not an answer that can be read"),
    ],
)
def test_what_goes_wrong_is_in_the_record(answer: object, error: str) -> None:
    record = called(answer)
    assert error in record.error
    assert not record.is_complete
    assert record.ended_s > 0


def test_nobody_there_is_a_record_too() -> None:
    record = asyncio.run(call(Endpoint("gone", "127.0.0.1", 1), b""))
    assert record.status == 0
    assert record.error.startswith("cannot connect")


def test_a_server_that_never_answers_is_given_up() -> None:
    async def scenario() -> CallRecord:
        is_over = asyncio.Event()

        async def silent(writer: asyncio.StreamWriter) -> None:
            await is_over.wait()

        async with fake_server(silent) as (_, endpoint):
            record = await call(endpoint, endpoint.head("POST", "/", 0), timeout_s=0.05)
            is_over.set()
            return record

    assert asyncio.run(scenario()).error == "no end within 0.05 s"


@pytest.mark.parametrize(
    ("text", "name", "port", "prefix"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1:8000", 8000, ""),
        ("a=http://host/v1/", "a", 80, ""),
        ("b=https://host/api/v1", "b", 443, "/api"),
    ],
)
def test_addresses(text: str, name: str, port: int, prefix: str) -> None:
    endpoint = Endpoint.parse(text)
    assert (endpoint.name, endpoint.port, endpoint.prefix) == (name, port, prefix)


@pytest.mark.parametrize("text", ["a=ftp://host", "host:80", "a=http://host:x", "http://"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not an address"):
        Endpoint.parse(text)
