"""What the engine promises, seen from outside, on the sim executor."""

from __future__ import annotations

import pytest

from tests.engine_driver import EngineDriver, make_request
from tidegate.request import FinishReason, SamplingParams

B = 4


def _prompt(length: int, start: int = 100) -> list[int]:
    return list(range(start, start + length))


@pytest.mark.parametrize("length", [1, B - 1, B, B + 1, 2 * B, 2 * B + 1, 3 * B - 1])
def test_cached_and_uncached_give_the_same_text_at_block_boundaries(length):
    cold = EngineDriver(block_size=B)
    cold.submit(make_request("a", _prompt(length)))
    cold.run()
    warm = EngineDriver(block_size=B)
    warm.submit(make_request("first", _prompt(length)))
    warm.run()
    warm.submit(make_request("a", _prompt(length)))
    warm.run()
    assert warm.text("a") == cold.text("a")
    # Whole blocks are shared and the rest is copied; the last token is always computed.
    assert warm.firsts["a"].prefill.num_cached_tokens == length - 1


def test_the_next_turn_hits_what_was_generated():
    driver = EngineDriver(block_size=B, max_num_batched_tokens=64)
    driver.submit(make_request("turn1", _prompt(10), max_tokens=11))
    driver.run()
    next_prompt = [*_prompt(10), *driver.text("turn1"), 7, 8, 9]
    driver.submit(make_request("turn2", next_prompt))
    driver.run()
    assert driver.firsts["turn2"].prefill.num_cached_tokens == 20  # the last sampled token was never computed


def test_a_tail_that_is_copied_from_a_running_request_is_the_one_at_its_prompts_end():
    driver = EngineDriver(block_size=B, max_num_batched_tokens=64)
    driver.submit(make_request("long", _prompt(6), max_tokens=12))
    driver.step()
    driver.submit(make_request("twin", [*_prompt(6), 9, 9]))
    driver.run()
    assert driver.firsts["twin"].prefill.num_cached_tokens == 6
    alone = EngineDriver(block_size=B)
    alone.submit(make_request("twin", [*_prompt(6), 9, 9]))
    alone.run()
    assert driver.text("twin") == alone.text("twin")


def test_finished_requests_leave_and_waiting_ones_join_in_the_same_step():
    driver = EngineDriver(max_num_seqs=2, max_num_batched_tokens=64)
    driver.submit(*[make_request(f"r{i}", _prompt(5, 100 * i), max_tokens=3) for i in range(4)])
    running = []
    while driver.step():
        running.append(driver.engine.scheduler.num_running)
    assert driver.num_steps == 6
    assert all(len(driver.text(f"r{i}")) == 3 for i in range(4))


def test_blocks_are_reusable_in_the_step_after_their_last_holder_ends():
    driver = EngineDriver(num_blocks=3, block_size=B, max_num_seqs=2, max_num_batched_tokens=64)
    driver.submit(make_request("a", _prompt(8), max_tokens=3), make_request("b", _prompt(9, 500), max_tokens=2))
    while not driver.reasons["a"]:
        driver.step()
    assert driver.text("b") == []
    driver.step()
    assert len(driver.text("b")) == 1


def test_a_cold_prefix_that_arrives_many_times_at_once_is_computed_once():
    prefix = _prompt(1500)
    driver = EngineDriver(num_blocks=400, block_size=32, max_num_seqs=32, max_num_batched_tokens=512, check_kv=False)
    tails = [[2000 + i] * 10 for i in range(32)]
    driver.submit(*[make_request(f"r{i}", prefix + tail, max_tokens=4) for i, tail in enumerate(tails)])
    driver.run()
    assert driver.num_prefill_tokens == len(prefix) + sum(len(tail) for tail in tails)


def test_a_waiting_twin_goes_on_when_the_one_that_computes_its_prefix_is_cancelled():
    driver = EngineDriver(block_size=B, max_num_batched_tokens=4, num_blocks=64)
    driver.submit(make_request("first", _prompt(20)), make_request("twin", [*_prompt(20), 5]))
    driver.step()
    driver.cancel("first")
    driver.run()
    alone = EngineDriver(block_size=B)
    alone.submit(make_request("twin", [*_prompt(20), 5]))
    alone.run()
    assert driver.text("twin") == alone.text("twin")


def test_namespaces_do_not_share_blocks():
    driver = EngineDriver(block_size=B)
    driver.submit(make_request("a", _prompt(12), namespace="a"))
    driver.run()
    driver.submit(make_request("b", _prompt(12), namespace="b"))
    driver.run()
    assert driver.firsts["b"].prefill.num_cached_tokens == 0


def test_an_exactly_fitting_request_runs_and_one_more_token_is_refused_with_its_numbers():
    driver = EngineDriver(num_blocks=4, block_size=B)
    driver.submit(make_request("fits", _prompt(10), max_tokens=7))
    driver.run()
    assert len(driver.text("fits")) == 7
    driver.submit(make_request("not", _prompt(10), max_tokens=8))
    assert driver.reasons["not"][0] is FinishReason.ERROR
    assert "needs 5 KV blocks; there are 4" in driver.errors["not"]


def test_preemption_takes_the_lowest_tier_then_the_newest_and_changes_no_text():
    driver = EngineDriver(num_blocks=9, block_size=B, max_num_seqs=3, max_num_batched_tokens=64)
    # Stop ids keep the expected growth small, so that all three are admitted and then run out of blocks.
    driver.engine.scheduler.output_length.observe(1)
    for request_id, priority in (("flex", 1), ("old", 0), ("new", 0)):
        driver.submit(make_request(request_id, _prompt(7, 100 * len(request_id)), 12, priority=priority))
    preempted: list[str] = []
    original = driver.engine.scheduler.preempt

    def spy(state, now):
        preempted.append(state.request.request_id)
        original(state, now)

    driver.engine.scheduler.preempt = spy
    driver.run()
    assert preempted[0] == "flex"
    assert "old" not in preempted
    for request_id in ("flex", "old", "new"):
        alone = EngineDriver(num_blocks=64, block_size=B)
        alone.submit(make_request(request_id, _prompt(7, 100 * len(request_id)), 12))
        alone.run()
        assert driver.text(request_id) == alone.text(request_id)


def test_cancel_frees_everything_in_each_phase():
    driver = EngineDriver(num_blocks=16, block_size=B, max_num_seqs=1, max_num_batched_tokens=4)
    driver.submit(make_request("prefilling", _prompt(10)), make_request("waiting", _prompt(5, 300)))
    driver.step()
    driver.cancel("waiting")
    driver.cancel("prefilling")
    assert driver.engine.pool.num_held == 0
    driver.submit(make_request("decoding", _prompt(3, 600)))
    driver.step()
    driver.step()
    driver.cancel("decoding")
    driver.cancel("decoding")
    driver.cancel("unknown")
    assert driver.engine.pool.num_held == 0
    assert not driver.engine.has_work
    assert all(driver.reasons[r][0] is FinishReason.ABORT for r in ("waiting", "prefilling", "decoding"))


def test_cancel_while_its_step_is_in_flight():
    driver = EngineDriver(block_size=B)
    driver.submit(make_request("gone", _prompt(6)), make_request("stays", _prompt(6, 300)))
    driver.step()
    plan = driver.engine.schedule(driver.clock.now())
    handle = driver.executor.launch(plan)
    driver.cancel("gone")
    driver._take(driver.engine.apply(driver.executor.collect(handle), driver.clock.now()))
    driver.run()
    assert len(driver.text("gone")) == 1
    assert len(driver.text("stays")) == 8


def test_a_failed_step_ends_its_own_requests_only():
    driver = EngineDriver(max_num_seqs=1)
    driver.submit(make_request("bad", _prompt(6)), make_request("good", _prompt(6, 300)))
    driver.engine.schedule(driver.clock.now())
    driver._take(driver.engine.fail_step("out of luck", driver.clock.now()))
    driver.run()
    assert driver.errors["bad"] == "out of luck"
    assert len(driver.text("good")) == 8


def test_choices_share_the_prompt_and_differ_in_text():
    driver = EngineDriver(block_size=B, max_num_seqs=4, max_num_batched_tokens=64)
    driver.submit(make_request("r", _prompt(10), 6, params=SamplingParams(n=4)))
    driver.step()
    assert driver.engine.pool.num_held == 2 + 4  # two full blocks once, the partial one four times
    driver.run()
    assert driver.num_prefill_tokens == 10
    texts = {tuple(tokens) for tokens in driver.outputs["r"].values()}
    assert len(texts) == 4
    for index in range(4):
        alone = EngineDriver(block_size=B)
        alone.submit(make_request("r", _prompt(10), 6, params=SamplingParams(), seed=index))
        alone.run()
        assert alone.text("r") == driver.text("r", index)


def test_more_choices_than_slots_are_served_in_turn():
    driver = EngineDriver(block_size=B, max_num_seqs=2, max_num_batched_tokens=64)
    driver.submit(make_request("r", _prompt(9), 6, params=SamplingParams(n=7)))
    driver.run()
    assert len(driver.reasons["r"]) == 7
    assert all(len(tokens) == 6 for tokens in driver.outputs["r"].values())


def test_min_tokens_keeps_stop_ids_away():
    first = EngineDriver()
    first.submit(make_request("r", _prompt(5), 6))
    first.run()
    stop_id = first.text("r")[1]
    ended = EngineDriver()
    ended.submit(make_request("r", _prompt(5), 6, stop_token_ids=(stop_id,)))
    ended.run()
    assert ended.text("r") == first.text("r")[:2]
    assert ended.reasons["r"][0] is FinishReason.STOP
    kept = EngineDriver()
    params = SamplingParams(temperature=0.0, min_tokens=4)
    kept.submit(make_request("r", _prompt(5), 6, stop_token_ids=(stop_id,), params=params))
    kept.run()
    assert len(kept.text("r")) >= 4


def test_times_of_the_prefill_add_up():
    driver = EngineDriver(max_num_batched_tokens=8, max_num_seqs=4)
    driver.submit(*[make_request(f"r{i}", _prompt(20, 100 * i)) for i in range(3)])
    driver.run()
    for i in range(3):
        times = driver.firsts[f"r{i}"].prefill
        span = times.first_token_s - times.scheduled_s
        assert times.own_prefill_s + times.interference_s == pytest.approx(span)
        assert times.own_prefill_s > 0


def test_more_decodes_than_the_budget_take_turns():
    driver = EngineDriver(max_num_seqs=4, max_num_batched_tokens=2, num_blocks=64)
    driver.submit(*[make_request(f"r{i}", [i + 1], 5) for i in range(4)])
    driver.run()
    assert all(len(driver.text(f"r{i}")) == 5 for i in range(4))


def test_prompt_logprobs_cover_the_prompt_over_chunks():
    driver = EngineDriver(max_num_batched_tokens=4)
    driver.submit(make_request("r", _prompt(10), 2, params=SamplingParams(temperature=0.0, prompt_logprobs=0)))
    driver.run()
    entries = driver.firsts["r"].prompt_logprobs
    assert entries[0] is None
    assert [entry.token_id for entry in entries[1:]] == _prompt(10)[1:]
