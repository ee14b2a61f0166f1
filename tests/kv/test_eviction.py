"""Which block goes first, and what that is worth."""

from __future__ import annotations

import json

import pytest

from tests.engine_driver import EngineDriver, make_request
from tidegate.bench.eviction import Access, mix, read_mooncake, replay
from tidegate.kv.block_pool import NO_BLOCK, BlockContent, BlockPool, BlockUser

B = 4
PREFIX = list(range(1, 17))


def _publish(pool: BlockPool, name: bytes, user: BlockUser, now: float) -> int:
    (block_id,) = pool.allocate(1, now)
    pool.publish(block_id, BlockContent(name, b"", NO_BLOCK, [*name]), user, now)
    pool.release([block_id], now)
    return block_id


def _use(pool: BlockPool, block_id: int, user: BlockUser, now: float) -> None:
    pool.hold([block_id], user, now)
    pool.release([block_id], now)


def test_lru_gives_up_what_was_not_used_for_longest():
    pool = BlockPool(2, "lru")
    user = BlockUser("u")
    a, b = (_publish(pool, name, user, 1.0) for name in (b"a", b"b"))
    _use(pool, a, user, 2.0)
    assert pool.allocate(1, 3.0) == [b]


def test_lfu_gives_up_what_was_used_least():
    pool = BlockPool(2, "lfu")
    user = BlockUser("u")
    a, b = (_publish(pool, name, user, 1.0) for name in (b"a", b"b"))
    _use(pool, a, user, 2.0)
    _use(pool, a, user, 2.0)
    _use(pool, b, user, 3.0)
    assert pool.allocate(1, 4.0) == [b]


def test_cost_aware_gives_up_lower_tiers_first_and_shared_blocks_last():
    pool = BlockPool(3, "cost-aware")
    shared = _publish(pool, b"s", BlockUser("one"), 1.0)
    _use(pool, shared, BlockUser("two"), 1.0)
    flex = _publish(pool, b"f", BlockUser("bulk", priority=1), 3.0)
    own = _publish(pool, b"o", BlockUser("chat"), 2.0)
    assert pool.allocate(3, 4.0) == [flex, own, shared]


def test_cost_aware_gives_up_a_shared_block_that_nobody_uses_any_more():
    pool = BlockPool(4, "cost-aware")
    shared = _publish(pool, b"s", BlockUser("one"), 0.0)
    _use(pool, shared, BlockUser("two"), 0.0)
    for i in range(20):
        _publish(pool, b"%d" % i, BlockUser(f"one-off {i}"), 1.0 + i)
    assert pool.cache.find(b"s") is None


@pytest.mark.parametrize("policy", ["lru", "lfu", "cost-aware"])
def test_a_prefix_goes_from_its_end(policy):
    driver = EngineDriver(num_blocks=8, block_size=B, max_num_batched_tokens=64, eviction=policy)
    driver.submit(make_request("a", PREFIX, 1))
    driver.run()
    driver.submit(make_request("b", list(range(100, 122)), 1))  # six blocks: two of the four must go
    driver.run()
    driver.submit(make_request("c", [*PREFIX[:9], 99], 1))
    driver.run()
    assert driver.firsts["c"].prefill.num_cached_tokens == 8


@pytest.mark.parametrize(("policy", "stays"), [("lru", False), ("cost-aware", True)])
def test_a_hot_shared_prefix_stays_under_a_stream_of_one_off_prompts(policy, stays):
    driver = EngineDriver(num_blocks=20, block_size=B, max_num_batched_tokens=64, eviction=policy)
    for i in range(8):
        driver.submit(make_request(f"hot{i}", [*PREFIX, 500 + i], 1))
        driver.run()
    for i in range(5):  # one and a half times what the cache holds
        driver.submit(make_request(f"one-off{i}", [1000 * (i + 1) + j for j in range(24)], 1))
        driver.run()
    driver.submit(make_request("again", [*PREFIX, 600], 1))
    driver.run()
    assert (driver.firsts["again"].prefill.num_cached_tokens >= len(PREFIX)) is stays


@pytest.mark.parametrize("capacity", [1000, 4000])
def test_cost_aware_finds_more_than_lru_in_a_mix_of_shared_prompts_chats_and_one_off_prompts(capacity):
    accesses = mix(3000, seed=3)
    lru, cost_aware = (replay(accesses, policy, capacity).share for policy in ("lru", "cost-aware"))
    assert cost_aware > lru + (0.02 if capacity == 1000 else 0.0)


def test_lru_finds_more_than_lfu_where_what_is_used_changes():
    # Two prompts take turns for a while, then two others do.
    accesses = [
        Access(float(i), f"chat{i}", [1000 * (i // 40) + 100 * (i % 2) + place for place in range(10)])
        for i in range(400)
    ]
    lru, lfu = (replay(accesses, policy, 24).share for policy in ("lru", "lfu"))
    assert lru > 0.9 > lfu + 0.2


def test_a_trace_is_read_as_it_is_published(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps({"timestamp": 1500, "input_length": 900, "output_length": 3, "hash_ids": [4, 5]}) + "\n")
    assert list(read_mooncake(path)) == [Access(1.5, "r0", [4, 5])]
