"""The randomness of sampling: Gumbel noise that is a pure function of (seed, position, token id).

Owns: the hash, and how noise is made of it. Nothing else enters, so that a token depends on (seed, position, logits)
alone: not on the batch, nor on which other tokens may be drawn, nor on the size of the vocabulary.

argmax(logit / T + Gumbel noise) draws from softmax(logit / T). Gumbel noise is -log(E) with E exponential, and
exponentials have no memory: of 32 of them, the least is exponential with a 32nd of the mean, each of the 32 is equally
likely to be it, and the others exceed it by fresh exponentials. So the noise of a group of 32 tokens is made from the
top: one hash gives the group's least exponential and its leader, the token that has it; the other tokens' own hashes
are only computed where a token can still win. The 32 values are exactly independent all the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tidegate.executor.sampler_groups import GROUP_SIZE, Ids

FloatNoise = npt.NDArray[np.float64]
_Words = npt.NDArray[np.uint64]

_MASK = 2**64 - 1
# Made once: on short arrays, making a scalar costs as much as using it.
_STEP = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio, odd: distinct indexes give distinct, well spread words
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_TOKEN_STREAM = np.uint64(0xD1B54A32D192ED03)
_12, _27, _30, _31, _32 = (np.uint64(num_bits) for num_bits in (12, 27, 30, 31, 32))
_PLACE_BITS = np.uint64(GROUP_SIZE - 1)
_DRAWS_AT_ONCE = 16  # few calls a draw, yet all of it stays in a core's cache
_ROUNDING = 2e-5  # more than float32 arithmetic on logarithms of this size can be off


@dataclass(slots=True)
class Noise:
    """The noise of one draw: bounds for each group, and exact values where asked. Arrays are [num_groups]."""

    words: _Words
    leaders: Ids
    """Which of its 32 places has a group's least exponential."""
    log_least: npt.NDArray[np.float32]
    """At most the logarithm of a group's least exponential, and close to it where that is small (where it matters)."""
    token_key: np.uint64

    def log_exponentials(self, token_ids: Ids, group_ids: Ids, places: Ids) -> FloatNoise:
        """Minus the Gumbel noise of some tokens, each given with its group and its place there."""
        token_words = token_ids.astype(np.uint64)
        token_words *= _STEP
        token_words += self.token_key
        group_words = self.words[group_ids]
        both = _exponentials(np.concatenate((group_words, _mix_words(token_words))))
        exponentials, excesses = both[: token_ids.size], both[token_ids.size :]
        exponentials *= 1.0 / GROUP_SIZE
        excesses[self.leaders[group_ids] == places] = 0.0
        exponentials += excesses
        return np.log(exponentials, out=exponentials)

    def log_least_of(self, group_id: int) -> float:
        """The logarithm of one group's least exponential."""
        return math.log(-math.log1p(-((int(self.words[group_id]) >> 12) + 0.5) * 2.0**-52) / GROUP_SIZE)


class NoiseSource:
    """Makes the noise of draws, for a vocabulary of `num_groups` groups."""

    def __init__(self, num_groups: int) -> None:
        self._group_steps = np.arange(num_groups, dtype=np.uint64) * _STEP

    def of_draws(self, draws: Sequence[tuple[int, int]]) -> Iterator[Noise]:
        """One Noise for each (seed, position), in order. Seeds are taken modulo 2**64."""
        for start in range(0, len(draws), _DRAWS_AT_ONCE):
            yield from self._of_some(draws[start : start + _DRAWS_AT_ONCE])

    def _of_some(self, draws: Sequence[tuple[int, int]]) -> Iterator[Noise]:
        seeds = np.array([seed & _MASK for seed, _ in draws], dtype=np.uint64)
        positions = np.array([position for _, position in draws], dtype=np.uint64)
        keys = _mix_words(seeds + _STEP)
        keys += positions * _STEP
        token_keys = _mix_words(_mix_words(keys) ^ _TOKEN_STREAM)
        words = _mix_words(self._group_steps + keys[:, None])
        # The lowest bits of a word are not in its exponential, so they are free to choose the leader.
        leaders = (words & _PLACE_BITS).view(np.int64)
        # -log(1 - v) >= v. The top 32 bits round v down; where they are all 0, v is still at least 2**-53.
        log_least = (words >> _32).view(np.int64).astype(np.float32)
        np.maximum(log_least, np.float32(2.0**-21), out=log_least)
        np.log(log_least, out=log_least)
        log_least -= np.float32(32 * math.log(2.0) + math.log(GROUP_SIZE) + _ROUNDING)
        yield from map(Noise, words, leaders, log_least, token_keys)


def _mix_words(words: _Words) -> _Words:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014), a bijection of 64-bit words, in place."""
    scratch = words >> _30
    words ^= scratch
    words *= _MIX_1
    np.right_shift(words, _27, out=scratch)
    words ^= scratch
    words *= _MIX_2
    np.right_shift(words, _31, out=scratch)
    words ^= scratch
    return words


def _exponentials(words: _Words) -> FloatNoise:
    """Exponentials of mean 1, -log(1 - v) with v uniform from the top 52 bits: finite and never 0.

    The half keeps v off 0 and 1; 52 bits and a half are exact in a float64. Small ones, which win, are the finest.
    """
    uniforms = (words >> _12).view(np.int64).astype(np.float64)
    uniforms += 0.5
    uniforms *= -(2.0**-52)
    np.log1p(uniforms, out=uniforms)
    return np.negative(uniforms, out=uniforms)
