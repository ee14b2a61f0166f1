"""Workloads are pure and seeded, have the rates, lengths and shares they name, and say clearly what is wrong."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from statistics import fmean, pvariance

import pytest

from tidegate.bench.arrivals import (
    ClosedArrivals,
    ConstantArrivals,
    GammaArrivals,
    OpenArrivals,
    PoissonArrivals,
    StepArrivals,
    arrival_times,
)
from tidegate.bench.content import segment_token_ids, text, token_ids
from tidegate.bench.presets import PRESETS, load_workload
from tidegate.bench.workload import LengthClass, LognormalLength, Segment, TenantSpec, UniformLength, Workload, generate
from tidegate.config import ConfigError


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_seed_gives_the_same_work_and_another_seed_other_words(name: str) -> None:
    workload = PRESETS[name]
    items = generate(workload, 5.0, 20.0, 1)
    assert items == generate(workload, 5.0, 20.0, 1)
    other_words = generate(workload, 5.0, 20.0, 1, content_seed=2)
    assert [(i.arrival_s, i.num_prompt_tokens, i.max_tokens, i.tenant) for i in items] == [
        (i.arrival_s, i.num_prompt_tokens, i.max_tokens, i.tenant) for i in other_words
    ]

    def keys(of: list) -> set[int]:  # type: ignore[type-arg]
        return {segment.key for item in of for segment in item.content}

    assert not keys(items) & keys(other_words)
    assert not keys(items) & keys(generate(workload, 5.0, 20.0, 2))
    assert [item.index for item in items] == list(range(len(items)))


def test_uniform_is_the_mix_that_admission_is_judged_on() -> None:
    items = generate(PRESETS["uniform"], 20.0, 100.0, 0)
    assert len(items) == pytest.approx(2_000, rel=0.1)
    assert {item.length_class for item in items} == {"all"}
    assert min(i.num_prompt_tokens for i in items) >= 64
    assert max(i.num_prompt_tokens for i in items) <= 512
    assert all(32 <= item.max_tokens <= 128 and item.hang_up_after is None and item.ignore_eos for item in items)
    assert all(0 < item.arrival_s < 100 for item in items)


def test_heavy_has_a_tenth_of_long_prompts_and_clients_that_hang_up() -> None:
    items = generate(PRESETS["heavy"], 20.0, 100.0, 0)
    assert Counter(i.length_class for i in items)["long"] == pytest.approx(len(items) / 10, rel=0.3)
    for item in items:
        low, high = (2_000, 6_000) if item.length_class == "long" else (32, 256)
        assert low <= item.num_prompt_tokens <= high
        assert item.max_tokens == 1_024
        assert item.hang_up_after is not None
        assert 16 <= item.hang_up_after <= 300


def test_turns_of_a_conversation_follow_their_parent_and_do_not_raise_the_rate() -> None:
    items = generate(PRESETS["chat"], 10.0, 200.0, 0)
    assert len(items) == pytest.approx(2_000, rel=0.15)
    for item in items:
        if item.parent is not None:
            assert items[item.parent].session_id == item.session_id
            assert item.parent == item.index - 1
    assert max(Counter(item.session_id for item in items).values()) <= 6


def test_prefixes_are_shared_by_zipfs_law() -> None:
    items = generate(PRESETS["rag"], 20.0, 100.0, 0)
    counts = sorted(Counter(item.content[0].key for item in items).values(), reverse=True)
    assert len(counts) == 48
    assert counts[0] > 4 * counts[-1]


def test_tenants_keep_to_their_classes_and_tiers() -> None:
    items = generate(PRESETS["mixed"], 20.0, 100.0, 0)
    assert {(item.tenant, item.tier) for item in items} == {
        ("interactive", "priority"), ("app", "default"), ("bulk", "flex"),
    }  # fmt: skip
    assert {item.length_class for item in items if item.tenant == "interactive"} == {"short"}


def test_a_closed_loop_deals_its_items_to_its_clients() -> None:
    workload = Workload(
        arrivals=ClosedArrivals(clients=3), classes=PRESETS["uniform"].classes, tenants=(TenantSpec(name="t"),)
    )
    items = generate(workload, 1.0, 5.0, 0)
    assert Counter(item.client for item in items[:9]) == {0: 3, 1: 3, 2: 3}
    assert all(item.arrival_s == 0 for item in items)


@pytest.mark.parametrize(
    ("arrivals", "burstiness"),
    [(PoissonArrivals(), 1.0), (GammaArrivals(burstiness=4.0), 4.0), (ConstantArrivals(), 0.0)],
)
def test_arrivals_have_the_rate_and_the_burstiness_asked_for(arrivals: OpenArrivals, burstiness: float) -> None:
    times = list(arrival_times(arrivals, 10.0, 1_000.0, random.Random(0)))
    gaps = [later - earlier for earlier, later in zip([0.0, *times], times, strict=False)]
    assert len(times) == pytest.approx(10_000, rel=0.1)
    assert pvariance(gaps) / fmean(gaps) ** 2 == pytest.approx(burstiness, rel=0.15, abs=1e-6)
    assert times == sorted(times)


def test_load_steps_change_the_rate_at_equal_times() -> None:
    times = list(arrival_times(StepArrivals(scales=(1.0, 0.0, 3.0)), 10.0, 300.0, random.Random(0)))
    counts = Counter(int(time_s // 100) for time_s in times)
    assert counts[0] == pytest.approx(1_000, rel=0.15)
    assert counts[1] == 0
    assert counts[2] == pytest.approx(3_000, rel=0.1)


def test_lognormal_lengths_stay_within_their_bounds_and_have_their_median() -> None:
    length = LognormalLength(median=100, sigma=1.0, min=20, max=1_000)
    rng = random.Random(0)
    drawn = sorted(length.draw(rng) for _ in range(4_000))
    assert (drawn[0], drawn[-1]) == (20, 1_000)
    assert drawn[2_000] == pytest.approx(100, rel=0.1)


def test_equal_keys_are_equal_tokens_also_where_lengths_differ() -> None:
    assert segment_token_ids(Segment(5, 8)) == segment_token_ids(Segment(5, 20))[:8]
    assert segment_token_ids(Segment(5, 8)) != segment_token_ids(Segment(6, 8))
    assert len(token_ids((Segment(1, 3), Segment(2, 4)))) == 7
    assert len(text((Segment(1, 3), Segment(2, 4))).split()) == 7


def test_own_workloads_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        """
        retries = true
        arrivals = { kind = "gamma", burstiness = 3.0 }
        [[classes]]
        name = "only"
        prompt = { kind = "fixed", tokens = 10 }
        output = { kind = "uniform", min = 1, max = 4 }
        """
    )
    workload = load_workload(str(path))
    assert (workload.name, workload.retries) == ("mine", True)
    assert workload.classes == (
        LengthClass(name="only", prompt={"kind": "fixed", "tokens": 10}, output=UniformLength(min=1, max=4)),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("classes = []", "'classes'"),
        ("[[classes]]\nprompt = 3", "'classes.0.prompt'"),
        ("nonsense", "is not valid TOML"),
        (
            '[[classes]]\nprompt = {kind = "fixed", tokens = 1}\noutput = {kind = "fixed", tokens = 1}\nspeed = 2',
            "'classes.0.speed'",
        ),
        (
            'conversations = {turns = {kind = "fixed", tokens = 2}}\n[[classes]]\n'
            'prompt = {kind = "fixed", tokens = 1}\noutput = {kind = "fixed", tokens = 1}',
            "needs format text or chat",
        ),
    ],
)
def test_a_bad_file_is_one_clear_line(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        load_workload(str(path))


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean heavy"):
        load_workload("heavyy")
