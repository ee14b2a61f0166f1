"""KV shares: what a tenant holds is bounded at every step, others overtake it, and its cached blocks go first."""

from __future__ import annotations

import random

from tests.engine_driver import EngineDriver, make_request


def held(driver: EngineDriver, tenant: str) -> int:
    states = [s for s in driver.engine.scheduler.running_states() if s.request.tenant == tenant]
    return len({block_id for state in states for block_id in state.block_ids})


def test_a_share_is_never_exceeded_everyone_ends_and_others_overtake() -> None:
    rng = random.Random(3)
    driver = EngineDriver(num_blocks=40, max_num_seqs=8)
    for i in range(30):
        prompt = [rng.randrange(500) for _ in range(rng.randint(1, 24))]
        share = {"tenant": "capped", "max_kv_share": 0.4} if i % 2 else {"tenant": "free"}
        driver.submit(make_request(f"r{i}", prompt, max_tokens=rng.randint(1, 30), **share))
    most = 0
    for _ in range(3000):
        if not driver.engine.has_work:
            break
        driver.step()
        most = max(most, held(driver, "capped"))
    assert not driver.engine.has_work
    assert 8 <= most <= 16


def test_a_request_beyond_the_share_is_answered_at_once() -> None:
    driver = EngineDriver(num_blocks=40)
    driver.submit(make_request("r", [1] * 60, max_tokens=20, tenant="capped", max_kv_share=0.25))
    assert driver.reasons["r"]
    assert not driver.engine.has_work


def test_a_quiet_tenants_hot_prefix_survives_a_noisy_ones_stream() -> None:
    """And does not where the noisy one has no share."""
    for share, survives in ((0.4, True), (1.0, False)):
        driver = EngineDriver(num_blocks=64, block_size=4)
        hot = list(range(40))

        def serve(name: str, prompt: list[int], tenant: str, max_kv_share: float, driver: EngineDriver = driver) -> int:
            driver.submit(make_request(name, prompt, 2, tenant=tenant, namespace=tenant, max_kv_share=max_kv_share))
            driver.run()
            return driver.engine.pool.stats.hits_by_age and sum(driver.engine.pool.stats.hits_by_age)

        before = serve("q0", hot, "quiet", 1.0)
        for i in range(30):
            before = serve(f"n{i}", [500 + i, *range(100, 130)], "noisy", share)
        hits = serve("q1", hot, "quiet", 1.0) - before
        assert (hits >= 9) is survives
