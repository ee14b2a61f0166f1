"""The load generator against a server of bytes: it keeps its schedule, its conversations and its temper."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.bench.fake_server import Answer, completion_events, event, fake_server, refuses, sends, stream_bytes
from tidegate.bench.body import RequestBodies
from tidegate.bench.load import LoadGenerator, LoadOptions, LoadRun
from tidegate.bench.outcome import Ending
from tidegate.bench.score import Objectives
from tidegate.bench.workload import Segment, WorkItem

WHOLE = sends(stream_bytes(completion_events(3)))


def item(index: int, arrival_s: float = 0.0, **changes: Any) -> WorkItem:
    values: dict[str, Any] = {
        "index": index, "arrival_s": arrival_s, "content": (Segment(index, 4),), "max_tokens": 3,
        "num_output_tokens": 3, "ignore_eos": True, "length_class": "all",
    }  # fmt: skip
    return WorkItem(**(values | changes))


def loaded(
    items: list[WorkItem], *answers: Answer, bodies: RequestBodies | None = None, **options: Any
) -> tuple[LoadRun, list[dict[str, Any]]]:
    async def scenario() -> tuple[LoadRun, list[bytes]]:
        async with fake_server(*answers) as (fake, endpoint):
            generator = LoadGenerator(endpoint, items, bodies or RequestBodies("tokens"), LoadOptions(**options))
            return await generator.send_all(), fake.requests

    run, requests = asyncio.run(scenario())
    return run, [json.loads(request.partition(b"\r\n\r\n")[2]) for request in requests]


def test_every_item_has_one_outcome_in_order() -> None:
    run, bodies = loaded([item(0), item(1), item(2)], WHOLE)
    assert [(o.item.index, o.ending, o.num_output_tokens) for o in run.outcomes] == [
        (0, Ending.COMPLETE, 3), (1, Ending.COMPLETE, 3), (2, Ending.COMPLETE, 3),
    ]  # fmt: skip
    assert all(len(body["prompt"]) == 4 and body["max_tokens"] == 3 and body["stream"] for body in bodies)


def test_requests_are_sent_when_due_whatever_the_server_does() -> None:
    async def scenario() -> int:
        all_are_there = asyncio.Event()

        async def answer(writer: asyncio.StreamWriter) -> None:
            await all_are_there.wait()  # nothing is answered until everything has been sent
            await WHOLE(writer)

        async with fake_server(answer) as (fake, endpoint):
            items = [item(index, 0.001 * index) for index in range(40)]
            task = asyncio.create_task(LoadGenerator(endpoint, items, RequestBodies("tokens")).send_all())
            while len(fake.requests) < 40:
                await asyncio.sleep(0)
            all_are_there.set()
            run = await task
            assert all(outcome.ending is Ending.COMPLETE for outcome in run.outcomes)
            return run.max_open

    assert asyncio.run(scenario()) == 40


def test_a_thousand_streams_at_once() -> None:
    async def scenario() -> tuple[int, int]:
        all_are_there = asyncio.Event()
        num_there = 0

        async def answer(writer: asyncio.StreamWriter) -> None:
            nonlocal num_there
            num_there += 1
            if num_there == 1_000:
                all_are_there.set()
            await all_are_there.wait()
            await WHOLE(writer)

        async with fake_server(answer) as (fake, endpoint):
            items = [item(index) for index in range(1_000)]
            run = await LoadGenerator(endpoint, items, RequestBodies("tokens")).send_all()
            return sum(outcome.ending is Ending.COMPLETE for outcome in run.outcomes), fake.max_open

    assert asyncio.run(scenario()) == (1_000, 1_000)


def test_hanging_up_where_the_client_has_enough_is_a_complete_answer() -> None:
    async def endless(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
        while not writer.is_closing():
            writer.write(event("x"))
            await writer.drain()
            await asyncio.sleep(0)

    run, _ = loaded([item(0, max_tokens=1_024, num_output_tokens=7)], endless)
    assert (run.outcomes[0].ending, run.outcomes[0].num_output_tokens) == (Ending.COMPLETE, 7)


@pytest.mark.parametrize(
    ("answer", "ending", "code"),
    [
        (refuses("429 Too Many", b'{"error":{"code":"queue_full"}}'), Ending.REFUSED, "queue_full"),
        (refuses("503 Unavailable", b'{"error":{"code":"no_workers"}}'), Ending.UNAVAILABLE, "no_workers"),
        (refuses("400 Bad", b"<html>"), Ending.INVALID, "400"),
        (sends(b""), Ending.FAILED, "the connection broke off"),
        (sends(stream_bytes(completion_events(2))), Ending.SHORT, ""),
    ],
)
def test_endings(answer: Answer, ending: Ending, code: str) -> None:
    run, _ = loaded([item(0)], answer)
    assert (run.outcomes[0].ending, run.outcomes[0].code) == (ending, code)


def test_an_endpoint_that_dies_midway_is_counted_and_the_others_still_come() -> None:
    run, _ = loaded([item(i, 0.01 * i) for i in range(4)], WHOLE, sends(b""))
    assert [o.ending for o in run.outcomes] == [Ending.COMPLETE, Ending.FAILED, Ending.FAILED, Ending.FAILED]


def test_a_tier_or_a_clamp_that_was_not_asked_for_is_a_downgrade() -> None:
    def whole_with(header: bytes, tier: bytes) -> Answer:
        data = stream_bytes([b'data: {"choices":[],"service_tier":"%b"}\n\n' % tier, *completion_events(3)])
        return sends(data.replace(b"\r\n", b"\r\n" + header, 1))

    header = b"x-tidegate-admission: downgrade; reason=slots; predicted_ttft_ms=250\r\n"
    asked = [item(0, tier="priority"), item(1, 0.05, tier="priority"), item(2, 0.1, tier="priority")]
    run, bodies = loaded(
        asked, whole_with(b"", b"priority"), whole_with(b"", b"default"), whole_with(header, b"priority")
    )
    assert [o.is_downgraded for o in run.outcomes] == [False, True, True]
    assert [o.predicted_ttft_s for o in run.outcomes] == [None, None, 0.25]
    assert bodies[0]["service_tier"] == "priority"


@pytest.mark.parametrize(
    ("first", "num_attempts", "ending"),
    [
        (refuses("429 Too Many", headers=b"retry-after: 0.01\r\n"), 2, Ending.COMPLETE),
        (refuses("503 Gone", headers=b"retry-after: 0.01\r\n"), 2, Ending.COMPLETE),
        (refuses("429 Too Many", headers=b"x-should-retry: false\r\n"), 1, Ending.REFUSED),
        (refuses("400 Bad"), 1, Ending.INVALID),
    ],
)
def test_retries_are_those_of_the_openai_client(first: Answer, num_attempts: int, ending: Ending) -> None:
    run, _ = loaded([item(0)], first, WHOLE, retries=True)
    assert (run.outcomes[0].num_attempts, run.outcomes[0].ending) == (num_attempts, ending)


def test_retries_end_and_count_as_one_request() -> None:
    run, bodies = loaded([item(0)], refuses("429 Too Many", headers=b"retry-after: 0.01\r\n"), retries=True)
    outcome = run.outcomes[0]
    assert (len(run.outcomes), outcome.num_attempts, len(bodies)) == (1, 3, 3)
    assert outcome.time_to_refuse_s is not None
    assert outcome.time_to_refuse_s < outcome.e2e_s - 0.02, "the pauses between retries are the client's own"


def test_a_conversation_sends_again_what_was_said() -> None:
    turns = [
        item(0, content=(Segment(1, 3), Segment(2, 2)), session_id="s"),
        item(1, content=(Segment(3, 2),), parent=0, session_id="s"),
    ]
    run, bodies = loaded(turns, WHOLE, bodies=RequestBodies("text"))
    assert [o.ending for o in run.outcomes] == [Ending.COMPLETE, Ending.COMPLETE]
    assert bodies[1]["prompt"].startswith(bodies[0]["prompt"] + "\nt0 t1 t2 \n")
    assert bodies[1]["prompt_cache_key"] == "s"
    assert run.outcomes[1].arrival_s >= run.outcomes[0].ended_s


def test_a_conversation_ends_with_a_turn_that_fails() -> None:
    turns = [item(0), item(1, parent=0), item(2, parent=1)]
    run, bodies = loaded(turns, refuses("429 Too Many"), bodies=RequestBodies("chat"))
    assert [o.ending for o in run.outcomes] == [Ending.REFUSED, Ending.UNSENT, Ending.UNSENT]
    assert bodies[0]["messages"][-1]["role"] == "user"


def test_a_closed_loop_waits_for_its_answers() -> None:
    async def scenario() -> tuple[int, int]:
        async with fake_server(WHOLE) as (_, endpoint):
            items = [item(index, client=index % 2) for index in range(10)]
            run = await LoadGenerator(endpoint, items, RequestBodies("tokens")).send_all()
            return len(run.outcomes), run.max_open

    num_outcomes, max_open = asyncio.run(scenario())
    assert (num_outcomes, max_open) == (10, 2)


def test_what_has_ended_before_an_interruption_is_kept() -> None:
    async def scenario() -> LoadRun:
        async def never(writer: asyncio.StreamWriter) -> None:
            await interrupted.wait()

        interrupted = asyncio.Event()
        async with fake_server(WHOLE, never) as (fake, endpoint):
            generator = LoadGenerator(endpoint, [item(0), item(1, 0.02)], RequestBodies("tokens"))
            task = asyncio.create_task(generator.send_all())
            while len(fake.requests) < 2:
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            interrupted.set()
            return generator.run

    run = asyncio.run(scenario())
    assert run.is_interrupted
    assert [o.item.index for o in run.outcomes] == [0]


def test_objectives_are_sent_along_when_asked_for() -> None:
    objectives = Objectives({"all": 0.5}, {"all": 0.03})
    _, bodies = loaded([item(0)], WHOLE, bodies=RequestBodies("tokens", objectives=objectives))
    assert bodies[0]["slo"] == {"ttft_ms": 500, "tpot_ms": 30}


def test_each_tenant_sends_its_own_key() -> None:
    async def scenario() -> list[bytes]:
        async with fake_server(WHOLE) as (fake, endpoint):
            generator = LoadGenerator(endpoint, [item(0, api_key="secret")], RequestBodies("tokens"))
            await generator.send_all()
            return fake.requests

    assert b"Authorization: Bearer secret\r\n" in asyncio.run(scenario())[0]


def test_outcomes_are_told_as_they_come() -> None:
    seen: list[int] = []
    note: Callable[[Any], None] = lambda outcome: seen.append(outcome.item.index)  # noqa: E731

    async def scenario() -> None:
        async with fake_server(WHOLE) as (_, endpoint):
            await LoadGenerator(endpoint, [item(0), item(1)], RequestBodies("tokens"), on_outcome=note).send_all()

    asyncio.run(scenario())
    assert sorted(seen) == [0, 1]
