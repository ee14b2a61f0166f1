"""A conversation's blocks end with its time to live, those of others never do."""

from __future__ import annotations

import pytest

from tests.engine_driver import EngineDriver, make_request
from tidegate.kv.sessions import BlockUser, Sessions

B = 4
TTL_S = 100.0


def _driver(**changes) -> EngineDriver:
    return EngineDriver(**({"block_size": B, "max_num_batched_tokens": 64, "session_ttl": TTL_S} | changes))


def _silence(driver: EngineDriver, seconds: float) -> None:
    driver.clock.advance_to(driver.clock.now() + seconds)
    driver.step()
    driver.engine.audit()


def test_a_silent_conversation_leaves_the_cache_when_its_time_is_up():
    driver = _driver()
    driver.submit(make_request("turn", list(range(1, 18)), session_id="chat"))
    driver.run()
    _silence(driver, TTL_S - 1)
    assert driver.engine.pool.num_cached > 0
    _silence(driver, 1)
    assert driver.engine.pool.num_cached == 0
    assert driver.engine.pool.stats.num_expired == 6
    assert driver.engine.pool.stats.num_evictions == 0
    assert len(driver.engine.pool.cache.sessions) == 0


def test_each_turn_begins_the_time_anew():
    driver = _driver()
    driver.submit(make_request("turn1", list(range(1, 18)), session_id="chat"))
    driver.run()
    _silence(driver, TTL_S - 1)
    driver.submit(make_request("turn2", list(range(1, 22)), session_id="chat"))
    driver.run()
    assert driver.firsts["turn2"].prefill.num_cached_tokens == 17
    _silence(driver, TTL_S - 1)
    driver.submit(make_request("turn3", list(range(1, 26)), session_id="chat"))
    driver.run()
    assert driver.firsts["turn3"].prefill.num_cached_tokens == 21


def test_what_another_conversation_or_request_has_used_does_not_expire_with_the_first():
    shared = list(range(1, 10))
    for other in ({"session_id": "other"}, {}):
        driver = _driver()
        driver.submit(make_request("a", [*shared, 50, 51, 52, 53, 54], 1, session_id="first"))
        driver.run()
        driver.submit(make_request("b", [*shared, 60, 61], 1, **other))
        driver.run()
        if other:  # the second goes on while the first falls silent
            _silence(driver, TTL_S / 2)
            driver.submit(make_request("b2", [*shared, 60, 61, 62], 1, **other))
            driver.run()
            _silence(driver, TTL_S / 2)
        else:
            _silence(driver, TTL_S)
        assert driver.engine.pool.stats.num_expired > 0
        driver.submit(make_request("c", [*shared, 70], 1))
        driver.run()
        assert driver.firsts["c"].prefill.num_cached_tokens >= 8


def test_a_block_shared_by_two_conversations_outlives_both():
    driver = _driver()
    for name in ("a", "b"):
        driver.submit(make_request(name, [*range(1, 10), ord(name)], 1, session_id=name))
        driver.run()
    _silence(driver, 2 * TTL_S)
    assert driver.engine.pool.num_cached == 2


def test_an_equal_session_id_of_another_namespace_is_another_conversation():
    driver = _driver()
    driver.submit(make_request("a", list(range(1, 10)), 1, session_id="chat", namespace="a"))
    driver.run()
    _silence(driver, TTL_S - 1)
    driver.submit(make_request("b", list(range(1, 10)), 1, session_id="chat", namespace="b"))
    driver.run()
    _silence(driver, 2)
    assert driver.engine.pool.stats.num_expired == driver.engine.pool.num_cached == 3


def test_requests_without_a_session_do_not_expire():
    driver = _driver()
    driver.submit(make_request("a", list(range(1, 18))))
    driver.run()
    num_cached = driver.engine.pool.num_cached
    _silence(driver, 1000 * TTL_S)
    assert driver.engine.pool.num_cached == num_cached > 0


def test_an_answer_that_takes_longer_than_the_time_to_live_keeps_its_blocks():
    driver = _driver(session_ttl=1e-6)
    driver.submit(make_request("slow", list(range(1, 18)), 20, session_id="chat"))
    driver.run()
    alone = EngineDriver(block_size=B)
    alone.submit(make_request("slow", list(range(1, 18)), 20))
    alone.run()
    assert driver.text("slow") == alone.text("slow")
    _silence(driver, 1)
    assert driver.engine.pool.num_cached == 0


def test_a_request_may_bring_its_own_time_to_live():
    driver = _driver()
    driver.submit(make_request("a", list(range(1, 10)), 1, session_id="chat", session_ttl_s=5.0))
    driver.run()
    _silence(driver, 5)
    assert driver.engine.pool.num_cached == 0


def test_under_pressure_conversations_end_early():
    driver = _driver(num_blocks=8)
    driver.submit(make_request("a", list(range(1, 18)), 1, session_id="chat"))
    driver.run()
    driver.submit(make_request("b", list(range(100, 122)), 1))
    driver.run()
    assert driver.engine.pool.stats.num_evictions > 0
    assert len(driver.engine.pool.cache.sessions) == 1  # what is left of it
    _silence(driver, TTL_S)
    assert len(driver.engine.pool.cache.sessions) == 0


def test_expired_blocks_are_taken_before_any_other_is_evicted():
    driver = _driver(num_blocks=10)
    driver.submit(make_request("old", list(range(200, 210)), 1))
    driver.run()
    driver.submit(make_request("chat", list(range(1, 18)), 1, session_id="chat"))
    driver.run()
    driver.clock.advance_to(driver.clock.now() + TTL_S)
    driver.submit(make_request("new", list(range(300, 317)), 1))
    driver.run()
    assert driver.engine.pool.stats.num_evictions == 0
    driver.submit(make_request("old2", list(range(200, 211)), 1))
    driver.run()
    assert driver.firsts["old2"].prefill.num_cached_tokens == 10


def test_sessions_hold_one_valid_entry_each_and_forget_the_rest():
    sessions = Sessions()
    for i in range(1000):
        sessions.own(i, BlockUser(f"s{i}", ttl_s=10.0), now=float(i) / 1000)
        sessions.disown(i)
    assert len(sessions) == 0
    assert len(sessions._due) <= 65


@pytest.mark.parametrize("ttl_s", [1.0, 50.0])
def test_a_shorter_time_to_live_counts_from_its_use(ttl_s):
    sessions = Sessions()
    sessions.own(1, BlockUser("s", ttl_s=100.0), now=0.0)
    sessions.used(1, BlockUser("s", ttl_s=ttl_s), now=10.0)
    assert sessions.take_due(10.0 + ttl_s - 0.5) == []
    assert sessions.take_due(10.0 + ttl_s) == [1]
