"""What the cache tells of its life, and that no block is kept that another one makes useless."""

from __future__ import annotations

import pytest

from tests.engine_driver import EngineDriver, make_request
from tidegate.kv.block_pool import NO_BLOCK, BlockContent, BlockPool, BlockUser
from tidegate.metrics.load_snapshot import AGE_BOUNDS_S
from tidegate.scheduler.output_length import OutputLength

B = 4


def _chat(driver: EngineDriver, num_turns: int) -> None:
    prompt = [1, 2, 3, 4, 5]
    for turn in range(num_turns):
        name = f"turn{turn}"
        driver.submit(make_request(name, prompt, 2))
        driver.run()
        prompt = [*prompt, *driver.text(name), 7]


def test_a_conversation_leaves_no_outdated_partial_blocks_behind():
    driver = EngineDriver(block_size=B, max_num_batched_tokens=64)
    _chat(driver, 8)
    num_tokens = 5 + 7 * 3 + 1  # the last sampled token was never computed
    assert driver.engine.pool.num_cached == -(-num_tokens // B)
    assert driver.engine.pool.stats.num_superseded > 0
    assert driver.engine.pool.stats.num_evictions == 0


def test_a_shorter_partial_block_is_not_kept_beside_a_longer_one():
    driver = EngineDriver(block_size=B, max_num_batched_tokens=64)
    driver.submit(make_request("long", [1, 2, 3, 4, 5, 6, 7], 1))
    driver.run()
    driver.submit(make_request("short", [1, 2, 3, 4, 5, 6], 1))
    driver.run()
    assert driver.engine.pool.num_cached == 2


def test_a_partial_block_that_goes_on_differently_stays():
    pool = BlockPool(4)
    user = BlockUser("u")
    blocks = pool.allocate(2, 0.0)
    for block_id, tokens in zip(blocks, ([1, 2, 9], [1, 2, 3, 4]), strict=True):
        pool.publish(block_id, BlockContent(bytes(tokens), b"", NO_BLOCK, tokens), user, 0.0)
        pool.release([block_id], 0.0)
    assert pool.num_cached == 2
    assert pool.stats.num_superseded == 0


def test_a_superseded_block_that_is_held_stays_until_its_room_is_needed():
    pool = BlockPool(4)
    user = BlockUser("u")
    short, long = pool.allocate(2, 0.0)
    pool.publish(short, BlockContent(b"s", b"", NO_BLOCK, [1, 2]), user, 0.0)
    pool.publish(long, BlockContent(b"l", b"", NO_BLOCK, [1, 2, 3]), user, 0.0)
    assert pool.num_held == 2
    pool.release([short, long], 0.0)
    assert pool.num_cached == 2


def test_times_are_counted_in_their_classes():
    driver = EngineDriver(num_blocks=4, block_size=B, max_num_batched_tokens=64)
    driver.submit(make_request("a", [1, 2, 3, 4, 5, 6, 7, 8], 1))
    driver.run()
    driver.clock.advance_to(driver.clock.now() + 30.0)
    driver.submit(make_request("b", [1, 2, 3, 4, 5, 6, 7, 8, 9], 1))
    driver.run()
    stats = driver.engine.pool.stats
    at = AGE_BOUNDS_S.index(60.0)
    assert stats.hits_by_age[at] == sum(stats.hits_by_age) == 2
    assert sum(stats.freed_to_reused) == 0
    driver.clock.advance_to(driver.clock.now() + 500.0)
    driver.submit(make_request("c", list(range(20, 36)), 1))
    driver.run()
    assert stats.freed_to_reused[AGE_BOUNDS_S.index(600.0)] == 3
    assert stats.freed_to_reused_s == pytest.approx(1500.0, abs=1.0)
    assert stats.num_evictions == 3


def test_a_block_in_use_is_a_hit_of_no_age():
    driver = EngineDriver(block_size=B, max_num_batched_tokens=64)
    driver.submit(make_request("a", list(range(1, 9)), 8))
    driver.step()
    driver.submit(make_request("b", list(range(1, 10)), 1))
    driver.run()
    assert driver.engine.pool.stats.hits_by_age[0] == 2
    assert driver.engine.pool.stats.hit_age_s == 0.0


def test_tail_waste_is_what_the_last_block_had_room_for():
    driver = EngineDriver(block_size=B, max_num_batched_tokens=64)
    driver.submit(make_request("a", [1, 2, 3, 4, 5], 1))
    driver.run()
    assert driver.engine.pool.stats.num_finished_blocks == 2
    assert driver.engine.pool.stats.num_tail_waste_tokens == 3


def test_a_request_that_waits_beside_reclaimable_blocks_is_counted_once():
    driver = EngineDriver(num_blocks=8, block_size=B, max_num_batched_tokens=64)
    driver.submit(make_request("idle", list(range(900, 909)), 1))
    driver.run()
    driver.engine.scheduler.output_length = OutputLength()  # nothing learned: half of the cap is expected
    driver.submit(make_request("runs", list(range(1, 9)), 25), make_request("waits", list(range(50, 54)), 17))
    driver.run()
    stats = driver.engine.pool.stats
    assert (stats.num_delayed_for_growth, stats.num_delayed_for_blocks) == (1, 0)
    driver.submit(make_request("runs2", list(range(100, 116)), 8), make_request("waits2", list(range(200, 220)), 2))
    driver.run()
    assert (stats.num_delayed_for_growth, stats.num_delayed_for_blocks) == (1, 1)


def test_the_load_report_carries_the_counters():
    driver = EngineDriver(block_size=B)
    _chat(driver, 3)
    life = driver.engine.load(driver.clock.now()).cache
    assert life.policy == "lru"
    assert life.num_superseded == driver.engine.pool.stats.num_superseded > 0
    assert sum(life.hits_by_age) == sum(driver.engine.pool.stats.hits_by_age) > 0
