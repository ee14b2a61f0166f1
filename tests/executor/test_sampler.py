"""The sampler's behaviour row by row: edits, masks, broken logits, batches, and log-probabilities."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from tidegate.executor.sampler import Sampler
from tidegate.executor.sampler_logprobs import LEAST_LOGPROB
from tidegate.request import SamplingParams
from tidegate.scheduler.step import SampleSpec

GREEDY = SamplingParams(temperature=0.0)
NAN, INF = math.nan, math.inf
# Two positions for each of four seeds. A change here changes every seeded answer that users have seen.
FIXED_DRAWS = [29030, 478, 37898, 34838, 39129, 1564, 19158, 37917]


def row(*logits: float) -> npt.NDArray[np.float32]:
    return np.array([logits], dtype=np.float32)


def sample_one(logits: npt.NDArray[np.float32], params: SamplingParams, **given: object) -> int:
    spec = SampleSpec(0, given.pop("seed", 1), given.pop("position", 0), params, **given)  # type: ignore[arg-type]
    return Sampler(logits.shape[1]).sample(logits, [spec])[0][0]


def drawn_set(logits: npt.NDArray[np.float32], params: SamplingParams, **given: object) -> set[int]:
    return {sample_one(logits, params, position=position, **given) for position in range(200)}


# Greedy, temperature and seeds.


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    assert sample_one(row(0, 3, 3, 1), GREEDY) == 1
    assert sample_one(row(0, 3, 3, 1), SamplingParams(top_k=1)) == 1


def test_a_tiny_temperature_takes_the_largest_and_a_high_one_reaches_the_others() -> None:
    logits = row(0.0, 0.001, -3.0, -1e30)
    assert drawn_set(logits, SamplingParams(temperature=1e-6)) == {1}
    assert drawn_set(logits, SamplingParams(temperature=1e-6, top_p=0.5, top_k=3, min_p=0.5)) == {1}
    assert drawn_set(logits, SamplingParams(temperature=5e-324, top_p=0.5)) == {1}
    assert drawn_set(logits, SamplingParams(temperature=2.0)) == {0, 1, 2}


def test_a_seed_draws_the_same_tokens_on_every_machine_and_in_every_version() -> None:
    logits = np.sin(np.arange(49152, dtype=np.float64) * 0.7).astype(np.float32)[None] * 8
    drawn = [
        sample_one(logits, SamplingParams(), seed=seed, position=p) for seed in (0, 1, -1, 2**63 - 1) for p in (0, 1)
    ]
    assert drawn == FIXED_DRAWS


def test_any_integer_is_a_seed() -> None:
    logits = np.zeros((1, 64), dtype=np.float32)
    assert sample_one(logits, SamplingParams(), seed=-1) == sample_one(logits, SamplingParams(), seed=2**64 - 1)
    assert 0 <= sample_one(logits, SamplingParams(), seed=2**63 + 126) < 64


def test_rounding_of_logits_moves_few_draws() -> None:
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((400, 5000)).astype(np.float32) * 3
    moved = logits + rng.uniform(-1e-4, 1e-4, size=logits.shape).astype(np.float32)
    specs = [SampleSpec(0, index, index, SamplingParams(top_p=0.9)) for index in range(400)]
    sampler = Sampler(5000)
    pairs = zip(sampler.sample(logits, specs)[0], sampler.sample(moved, specs)[0], strict=True)
    assert sum(one != two for one, two in pairs) <= 2


def test_filters_do_not_change_the_noise_of_what_they_keep() -> None:
    logits = np.random.default_rng(1).standard_normal((1, 5000)).astype(np.float32)
    best = np.argsort(-logits[0])[:40]
    for position in range(50):
        token_id = sample_one(logits, SamplingParams(), position=position)
        filtered = sample_one(logits, SamplingParams(top_k=40), position=position)
        assert (filtered == token_id) or (token_id not in best and filtered in best)


# Batches.


def mixed_specs(vocab_size: int) -> list[SampleSpec]:
    params = [
        GREEDY,
        SamplingParams(),
        SamplingParams(temperature=0.7, top_p=0.9, logprobs=3),
        SamplingParams(top_k=10, seed=3),
        SamplingParams(min_p=0.1, logit_bias={3: 5.0}),
        SamplingParams(temperature=0.0, logprobs=0),
        SamplingParams(repetition_penalty=1.3, presence_penalty=0.5, allowed_token_ids=tuple(range(0, vocab_size, 3))),
        SamplingParams(temperature=2.0, top_p=0.99, bad_words=((4,), (1, 2))),
    ]
    return [
        SampleSpec(0, index, index, one, {5: 2, 6: 1}, [7, 8, 9], [0, 1], banned_token_ids=(11,) if index % 2 else ())
        for index, one in enumerate(params * 3)
    ]


def test_a_row_is_sampled_alone_as_in_any_batch() -> None:
    vocab_size = 20003
    specs = mixed_specs(vocab_size)
    logits = np.random.default_rng(2).standard_normal((len(specs), vocab_size)).astype(np.float32) * 4
    before = logits.copy()
    token_ids, logprobs = Sampler(vocab_size).sample(logits, specs)
    assert np.array_equal(logits, before)
    assert logprobs is not None
    for index, spec in enumerate(specs):
        alone, alone_logprobs = Sampler(vocab_size).sample(logits[index : index + 1].copy(), [spec])
        assert alone == [token_ids[index]]
        assert (alone_logprobs or [None]) == [logprobs[index]]
    order = np.random.default_rng(3).permutation(len(specs))
    shuffled, _ = Sampler(vocab_size).sample(logits[order], [specs[i] for i in order])
    assert shuffled == [token_ids[i] for i in order]


def test_rows_need_not_be_contiguous_nor_writable() -> None:
    logits = np.random.default_rng(4).standard_normal((4, 2000)).astype(np.float32)
    specs = mixed_specs(1000)[:4]
    expected = Sampler(1000).sample(logits[:, ::2].copy(), specs)
    view = logits[:, ::2]
    view.flags.writeable = False
    assert Sampler(1000).sample(view, specs) == expected


def test_no_samples_are_no_tokens() -> None:
    assert Sampler(8).sample(np.empty((0, 8), dtype=np.float32), []) == ([], None)


def test_a_shape_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="2 samples of 8 logits"):
        Sampler(8).sample(np.zeros((1, 8), dtype=np.float32), [SampleSpec(0, 1, 0, GREEDY)] * 2)
    with pytest.raises(ValueError, match="1 tokens of 8 logits"):
        Sampler(8).token_logprobs(np.zeros((1, 9), dtype=np.float32), [1], 0)


# Edits and masks.


def test_bias_bans_and_forces() -> None:
    logits = row(10, 9, -20, 0)
    assert sample_one(logits, SamplingParams(temperature=0.0, logit_bias={0: -100.0})) == 1
    assert drawn_set(logits, SamplingParams(logit_bias={2: 100.0})) == {2}
    assert 0 not in drawn_set(logits, SamplingParams(logit_bias={0: -100.0}))


def test_bias_has_the_last_word_over_penalties() -> None:
    params = SamplingParams(temperature=0.0, logit_bias={2: 100.0}, repetition_penalty=10.0, frequency_penalty=2.0)
    assert sample_one(row(10, 9, 8, 0), params, output_counts={2: 5}, prompt_token_ids=[2]) == 2


def test_only_allowed_tokens_are_drawn() -> None:
    assert drawn_set(row(9, 9, 1, 1, 9), SamplingParams(allowed_token_ids=(3, 2))) == {2, 3}


def test_banned_tokens_are_not_drawn() -> None:
    assert drawn_set(row(9, 1, 1, 9), SamplingParams(), banned_token_ids=(0, 3)) == {1, 2}


@pytest.mark.parametrize(
    ("recent", "expected"), [([], 2), ([0, 1], 0), ([9, 9, 0, 1], 0), ([0, 2], 2), ([1], 2), ([0, 1, 9], 2)]
)
def test_a_long_bad_word_is_kept_from_completing(recent: list[int], expected: int) -> None:
    params = SamplingParams(temperature=0.0, bad_words=((0, 1, 2),))
    assert sample_one(row(5, 4, 9), params, recent_token_ids=recent) == expected


def test_a_bad_word_of_one_token_is_always_banned() -> None:
    params = SamplingParams(bad_words=((1,), (2, 0)))
    assert drawn_set(row(1, 9, 1), params, recent_token_ids=[2]) == {2}
    assert drawn_set(row(1, 9, 1), params) == {0, 2}


def test_ids_outside_the_vocabulary_are_ignored() -> None:
    params = SamplingParams(
        temperature=0.0,
        logit_bias={99: 100.0, -1: 100.0, 1: 5.0},
        allowed_token_ids=(0, 1, 99, -3),
        bad_words=((77,),),
        repetition_penalty=2.0,
        frequency_penalty=1.0,
    )
    given = {"banned_token_ids": (55, -2), "output_counts": {88: 1, -1: 2}, "prompt_token_ids": [66, -5]}
    assert sample_one(row(1, 0, 9), params, **given) == 1
    assert sample_one(row(1, 0, 9), SamplingParams(temperature=0.0, allowed_token_ids=(99,))) == 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bans_give_way_when_they_leave_nothing(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, allowed_token_ids=(2, 1))
    assert sample_one(row(9, 1, 3, 0), params, banned_token_ids=(1, 2)) == 2
    params = SamplingParams(temperature=temperature, top_p=0.5, bad_words=((0,), (1,)))
    assert sample_one(row(1, 9), params) == 1


# Broken logits.


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(top_p=0.9, top_k=3, min_p=0.1)])
@pytest.mark.parametrize("extra", [{}, {"logit_bias": {3: -1.0}}, {"logprobs": 3}])
@pytest.mark.parametrize(
    ("logits", "expected"),
    [
        (row(NAN, 1, -INF, NAN), {1}),
        (row(1, INF, 5, -INF), {1}),
        (row(NAN, INF, 5, INF), {1, 3}),
        (row(-INF, -INF, -2, -INF), {2}),
        (row(-INF, -INF, -INF, -INF), {0}),
        (row(NAN, NAN, NAN, NAN), {0}),
        (row(3.4e38, -3.4e38, -3.4e38, -3.4e38), {0}),
        (row(-3.4e38, -3.4e38, -3.4e38, -INF), {0, 1, 2}),
    ],
)
def test_broken_logits_give_a_defined_token(
    params: SamplingParams, extra: dict[str, object], logits: npt.NDArray[np.float32], expected: set[int]
) -> None:
    params = msgspec.structs.replace(params, **extra)
    for position in range(20):
        spec = SampleSpec(0, 1, position, params)
        with np.errstate(all="raise"):
            token_ids, logprobs = Sampler(4).sample(logits, [spec])
        assert token_ids[0] in expected
        if logprobs is not None and logprobs[0] is not None:
            values = [logprobs[0].logprob, *(value for _, value in logprobs[0].top)]
            assert all(LEAST_LOGPROB <= value <= 0.0 for value in values)


# Log-probabilities.


def test_logprobs_are_the_models_own_whatever_the_request_changes() -> None:
    logits = row(1, 2, 3, 4)
    expected = logits[0] - math.log(np.exp(logits[0].astype(np.float64)).sum())
    params = SamplingParams(temperature=0.2, top_k=2, logit_bias={0: 100.0}, presence_penalty=1.0, logprobs=2)
    token_ids, logprobs = Sampler(4).sample(logits, [SampleSpec(0, 1, 0, params, {3: 1})])
    assert token_ids == [0]
    assert logprobs is not None and logprobs[0] is not None
    assert logprobs[0].token_id == 0
    assert logprobs[0].logprob == pytest.approx(expected[0], abs=1e-5)
    assert [token_id for token_id, _ in logprobs[0].top] == [3, 2]
    assert [value for _, value in logprobs[0].top] == pytest.approx([expected[3], expected[2]], abs=1e-5)


def test_only_rows_that_ask_get_logprobs() -> None:
    specs = [SampleSpec(0, 1, 0, GREEDY), SampleSpec(0, 1, 0, SamplingParams(temperature=0.0, logprobs=0))]
    _, logprobs = Sampler(3).sample(np.zeros((2, 3), dtype=np.float32), specs)
    assert logprobs is not None
    assert logprobs[0] is None
    assert logprobs[1] is not None and logprobs[1].top == ()
    assert logprobs[1].logprob == pytest.approx(-math.log(3))


def test_the_best_alternatives_come_first_and_equal_ones_by_id() -> None:
    vocab_size = 20003
    logits = np.round(np.random.default_rng(6).standard_normal((3, vocab_size)) * 2, 1).astype(np.float32)
    for entry, values in zip(
        Sampler(vocab_size).token_logprobs(logits, [0, 5, vocab_size - 1], 20), logits, strict=True
    ):
        expected = np.lexsort((np.arange(vocab_size), -values))[:20]
        assert [token_id for token_id, _ in entry.top] == expected.tolist()


def test_alternatives_are_no_more_than_the_vocabulary() -> None:
    (entry,) = Sampler(3).token_logprobs(row(0, 1, -INF), [2], 20)
    assert entry.logprob == LEAST_LOGPROB
    assert [token_id for token_id, _ in entry.top] == [1, 0, 2]
    assert Sampler(3).token_logprobs(row(0, 1, 2), [7], 0)[0].logprob == LEAST_LOGPROB
