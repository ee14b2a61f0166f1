"""Random requests, cancels and steps against the real engine, with the books audited after every move.

The sim executor keeps what each block position holds and draws tokens from the context read through the block table,
so a wrong block, a stale position or a lost copy changes the text. Every request that was not cancelled must get the
text that it gets alone in an engine with room to spare.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine_driver import EngineDriver, make_request
from tidegate.request import FinishReason, Request, SamplingParams
from tidegate.scheduler import long_decodes

BLOCK_SIZE = 4
NUM_BLOCKS = 24


@pytest.fixture(scope="module")
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@st.composite
def requests(draw: st.DrawFn) -> Request:
    # Few distinct prefixes, so that hits, shared blocks and cold prefixes computed together are common.
    prefix = draw(st.sampled_from([[], [1] * 3, [1] * 8, [1] * 8 + [2] * 8, [3] * 20]))
    tail = draw(st.lists(st.integers(10, 14), min_size=0 if prefix else 1, max_size=9))
    max_tokens = draw(st.integers(1, 30))
    n = draw(st.sampled_from([1, 1, 1, 2, 4]))
    temperature = draw(st.sampled_from([0.0, 1.0]))
    return make_request(
        "",
        prefix + tail,
        max_tokens,
        params=SamplingParams(n=n, temperature=temperature),
        priority=draw(st.sampled_from([0, 0, 1])),
        seed=draw(st.integers(0, 3)),
        namespace=draw(st.sampled_from(["", "other"])),
        session_id=draw(st.sampled_from(["", "chat", "other chat"])),
        session_ttl_s=draw(st.sampled_from([None, 0.001, 0.05])),
        stop_token_ids=tuple(draw(st.sets(st.integers(0, 999), max_size=20))),
    )


moves = st.lists(
    st.one_of(
        requests(),
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("cancel"), st.integers(0, 40)),
    ),
    min_size=1,
    max_size=40,
)


def _alone(request: Request) -> dict[int, list[int]]:
    driver = EngineDriver(num_blocks=400, block_size=BLOCK_SIZE, max_num_seqs=8, max_num_batched_tokens=4096)
    driver.submit(request)
    driver.run()
    return {index: list(tokens) for index, tokens in driver.outputs[request.request_id].items()}


@settings(max_examples=150)
@given(
    moves,
    st.integers(1, 5),
    st.sampled_from([1, 3, 8, 64]),
    st.sampled_from(["lru", "lfu", "cost-aware"]),
    st.booleans(),
    st.sampled_from([1, 4, 512]),
    st.sampled_from([1, 3]),
)
def test_random_traffic_keeps_the_books_and_the_text(
    patch, moves, max_num_seqs, max_num_batched_tokens, eviction, caching, long_output, min_turn
):
    patch.setattr(long_decodes, "MIN_TURN", min_turn)  # so that short texts take turns too
    patch.setattr(long_decodes, "MAX_PAUSE_S", 0.02)
    driver = EngineDriver(
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        eviction=eviction,
        enable_prefix_caching=caching,
        long_output=long_output,
    )
    submitted: dict[str, Request] = {}
    cancelled: set[str] = set()
    for move in moves:
        if isinstance(move, Request):
            move.request_id = f"r{len(submitted)}"
            submitted[move.request_id] = move
            driver.submit(move)
        elif move[0] == "step":
            for _ in range(move[1]):
                driver.step()
        elif submitted:
            request_id = f"r{move[1] % len(submitted)}"
            cancelled.add(request_id)
            driver.cancel(request_id)
    driver.run()

    pool = driver.engine.pool
    assert pool.num_held == 0
    assert pool.num_free + pool.num_cached == NUM_BLOCKS
    assert driver.engine.scheduler.num_running == 0
    assert len(driver.engine.scheduler.waiting) == 0
    assert not driver.engine.scheduler.long_decodes.is_turning
    assert driver.engine.scheduler.waiting.num_tokens == 0
    for request_id, request in submitted.items():
        reasons = driver.reasons[request_id]
        if request_id in driver.errors:
            assert -(-(request.max_total_tokens - 1) // BLOCK_SIZE) > NUM_BLOCKS
        elif request_id not in cancelled:
            assert set(reasons) == set(range(request.params.n))
            assert all(reason in (FinishReason.STOP, FinishReason.LENGTH) for reason in reasons.values())
            assert {i: tokens for i, tokens in driver.outputs[request_id].items()} == _alone(request)


@settings(max_examples=40)
@given(st.lists(requests(), min_size=2, max_size=12), st.integers(4, 12))
def test_every_request_ends_however_scarce_the_blocks(batch, num_blocks):
    driver = EngineDriver(num_blocks=num_blocks, block_size=BLOCK_SIZE, max_num_seqs=8, max_num_batched_tokens=32)
    for i, request in enumerate(batch):
        request.request_id = f"r{i}"
        driver.submit(request)
    driver.run()
    for i, request in enumerate(batch):
        if f"r{i}" not in driver.errors:
            assert len(driver.reasons[f"r{i}"]) == request.params.n
