"""What the sampler draws, over many positions, against exact probabilities; and that draws know nothing of each other.

Chi-square tests with fixed seeds: deterministic, and a wrong distribution fails them by orders of magnitude.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from tidegate.executor.sampler import Sampler
from tidegate.request import SamplingParams
from tidegate.scheduler.step import SampleSpec

Probs = npt.NDArray[np.float64]
TokenIds = npt.NDArray[np.int64]
LOGITS = np.array([2.0, 1.5, 1.0, 1.0, 0.0, -0.5, -1.0, -4.0], dtype=np.float32)


def softmax(logits: npt.NDArray[np.floating]) -> Probs:
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return weights / weights.sum()


def draws(
    logits: npt.NDArray[np.float32], params: SamplingParams, keys: list[tuple[int, int]], **given: object
) -> Probs:
    specs = [SampleSpec(0, seed, position, params, **given) for seed, position in keys]  # type: ignore[arg-type]
    token_ids, _ = Sampler(logits.size).sample(np.broadcast_to(logits, (len(keys), logits.size)), specs)
    return np.array(token_ids)


def assert_distributed(token_ids: TokenIds, probs: Probs) -> None:
    """Chi-square below its mean plus 4 standard deviations; impossible tokens never drawn.

    Tokens that are expected less than 5 times are left out: chi-square says nothing of them.
    """
    counts = np.bincount(token_ids, minlength=probs.size)
    assert counts[probs == 0].sum() == 0
    expected = probs * token_ids.size
    counts, expected = counts[expected >= 5], expected[expected >= 5]
    chi_square = ((counts - expected) ** 2 / expected).sum()
    freedom = max(expected.size - 1, 1)
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom) + 4


def positions(num: int, seed: int = 1) -> list[tuple[int, int]]:
    return [(seed, position) for position in range(num)]


def truncated(keep: list[int], temperature: float = 1.0) -> Probs:
    probs = softmax(LOGITS / temperature)
    kept = np.zeros_like(probs)
    kept[keep] = probs[keep]
    return kept / kept.sum()


@pytest.mark.parametrize(
    ("params", "probs"),
    [
        (SamplingParams(), softmax(LOGITS)),
        (SamplingParams(temperature=0.5), softmax(LOGITS / 0.5)),
        (SamplingParams(temperature=2.0), softmax(LOGITS / 2.0)),
        (SamplingParams(top_k=2), truncated([0, 1])),
        (SamplingParams(top_p=0.6), truncated([0, 1])),
        (SamplingParams(top_p=0.95), truncated([0, 1, 2, 3, 4, 5])),
        (SamplingParams(min_p=0.3), truncated([0, 1, 2, 3])),
        (SamplingParams(min_p=0.3, temperature=2.0), truncated([0, 1, 2, 3, 4], temperature=2.0)),
        # top_p counts the mass of what top_k left: 0.41 of it is token 0, 0.66 tokens 0 and 1.
        (SamplingParams(top_k=4, top_p=0.6), truncated([0, 1])),
    ],
)
def test_draws_follow_the_distribution(params: SamplingParams, probs: Probs) -> None:
    assert_distributed(draws(LOGITS, params, positions(5_000)), probs)


def test_draws_follow_the_penalised_distribution() -> None:
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.5)
    expected = LOGITS.copy()
    expected[0] = 2.0 / 1.5  # prompt only
    expected[1] = 1.5 / 1.5 - 3 * 0.25 - 0.5  # output only
    expected[5] = -0.5 * 1.5 - 0.25 - 0.5  # both: repetition counts once
    drawn = draws(LOGITS, params, positions(5_000), output_counts={1: 3, 5: 1}, prompt_token_ids=[0, 5, 5])
    assert_distributed(drawn, softmax(expected))


def test_every_token_of_a_large_vocabulary_is_as_likely_as_its_logit_says() -> None:
    # Equal logits, so every place of every group counts; drawn ids are pooled by place, by line and by chunk.
    vocab_size = 49152
    drawn = draws(np.zeros(vocab_size, dtype=np.float32), SamplingParams(), positions(5_000))
    for cell, num_cells in ((drawn % 512 // 16, 32), (drawn // 512 % 32, 32), (drawn // 16384, 3), (drawn // 1536, 32)):
        assert_distributed(cell, np.full(num_cells, 1 / num_cells))


def test_rare_and_common_tokens_of_one_group_keep_their_shares() -> None:
    # Ids 7, 519, 1031 and 1543 share a group: its leader must not be favoured over what its logit gives it.
    logits = np.full(16384, -np.inf, dtype=np.float32)
    shares = np.array([0.7, 0.2, 0.07, 0.03])
    logits[[7, 519, 1031, 1543]] = np.log(shares)
    assert_distributed(draws(logits, SamplingParams(), positions(5_000)) // 512, shares)


@pytest.mark.parametrize("by", ["position", "seed"])
@pytest.mark.parametrize("lag", [1, 2, 16])
def test_neighbouring_draws_are_independent(by: str, lag: int) -> None:
    logits = np.zeros(8, dtype=np.float32)
    keys = [(5, i) if by == "position" else (i, 5) for i in range(6_000)]
    drawn = draws(logits, SamplingParams(), keys)
    assert_distributed(drawn[:-lag] * 8 + drawn[lag:], np.full(64, 1 / 64))


def test_consecutive_seeds_at_consecutive_positions_are_independent() -> None:
    # Choice i of n uses seed + i: its answer must not be another's, shifted by one token.
    logits = np.zeros(8, dtype=np.float32)
    first = draws(logits, SamplingParams(), [(9, i) for i in range(6_000)])
    for seed, shift in ((10, 0), (10, 1), (8, 1), (11, 3)):
        other = draws(logits, SamplingParams(), [(seed, i + shift) for i in range(6_000)])
        assert_distributed(first * 8 + other, np.full(64, 1 / 64))


def test_noise_of_neighbouring_tokens_is_independent() -> None:
    # Which of tokens 0 and 1 wins says nothing of which of 2 and 3 does; nor 0 and 512, which share a group.
    def wins(token_id: int, other_id: int) -> TokenIds:
        logits = np.full(1024, -np.inf, dtype=np.float32)
        logits[[token_id, other_id]] = 0.0
        return (draws(logits, SamplingParams(), positions(5_000)) == token_id).astype(np.int64)

    for one, two in (((0, 1), (2, 3)), ((0, 512), (1, 513))):
        assert_distributed(wins(*one) * 2 + wins(*two), np.full(4, 0.25))
