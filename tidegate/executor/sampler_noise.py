"""The randomness of sampling: Gumbel noise that is a pure function of (seed, position, token id).

Owns: the hash, and how noise is made of it. Holds no state that a draw changes, so that a token depends on nothing but
(seed, position, logits): not on the batch, nor on which other tokens may be drawn.

argmax(logit / T + Gumbel noise) draws from softmax(logit / T). Gumbel noise is -log(E) with E exponential, and
exponentials have no memory: of 32 of them, the least is exponential with a 32nd of the mean, each of the 32 is equally
likely to be it, and the others exceed it by fresh exponentials. So the noise of a group of 32 tokens is made from the
top: one hash gives the group's least exponential and which token has it; the other tokens' own hashes are only
computed where a token can still win. The 32 values are exactly independent all the same.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tidegate.executor.sampler_groups import GROUP_SIZE, Ids, group_of, member_of

FloatNoise = npt.NDArray[np.float64]
_Words = npt.NDArray[np.uint64]

_MASK = 2**64 - 1
_STEP = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd: distinct indexes give distinct, well spread words
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_TOKEN_STREAM = 0xD1B54A32D192ED03


def _mix(word: int) -> int:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014): a bijection of 64-bit words that passes BigCrush."""
    word = (word ^ (word >> 30)) * _MIX_1 & _MASK
    word = (word ^ (word >> 27)) * _MIX_2 & _MASK
    return word ^ (word >> 31)


def _mix_words(words: _Words) -> _Words:
    """The same, of an array, in place."""
    scratch = words >> np.uint64(30)
    words ^= scratch
    words *= np.uint64(_MIX_1)
    np.right_shift(words, np.uint64(27), out=scratch)
    words ^= scratch
    words *= np.uint64(_MIX_2)
    np.right_shift(words, np.uint64(31), out=scratch)
    words ^= scratch
    return words


def _exponentials(words: _Words) -> FloatNoise:
    """Exponentials of mean 1 from the top 52 bits: never 0, never infinite, since 0 < uniform < 1 strictly."""
    uniform = (words >> np.uint64(12)).astype(np.float64)
    uniform += 0.5
    uniform *= 2.0**-52
    np.log(uniform, out=uniform)
    return np.negative(uniform, out=uniform)


class Noise:
    """The noise of one draw, for a vocabulary of `num_groups` groups. `seed` is any integer (taken modulo 2**64)."""

    def __init__(self, seed: int, position: int, num_groups: int) -> None:
        key = _mix((_mix((seed + _STEP) & _MASK) + position * _STEP) & _MASK)
        self._group_key = np.uint64(key)
        self._token_key = np.uint64(_mix(key ^ _TOKEN_STREAM))
        self._words = self._group_words(np.arange(num_groups, dtype=np.uint64))
        self._least = _exponentials(self._words)
        self._least *= 1.0 / GROUP_SIZE
        self.group_gumbels = -np.log(self._least)
        """The largest noise within each group, [num_groups]."""

    def _group_words(self, group_ids: _Words) -> _Words:
        return _mix_words(group_ids * np.uint64(_STEP) + self._group_key)

    def gumbels(self, token_ids: Ids) -> FloatNoise:
        """The noise of some tokens."""
        group_ids = group_of(token_ids)
        others = _exponentials(_mix_words(token_ids.astype(np.uint64) * np.uint64(_STEP) + self._token_key))
        # The lowest bits of a group's word are not in its exponential, so they are free to choose the place.
        places = (self._words[group_ids] & np.uint64(GROUP_SIZE - 1)).astype(np.int64)
        others[places == member_of(token_ids)] = 0.0
        others += self._least[group_ids]
        return -np.log(others)
