"""How long answers turn out to be, learned from those that ended; and how many blocks that will ask for.

`max_tokens` is only a cap: clients ask for 1,024 and stop at a hundred. What an answer that has produced p tokens still
has ahead is the mean of what recent answers longer than p had beyond p.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable

_WINDOW = 256
_PRIOR_SHARE = 0.5  # of its cap is what an answer is expected to use while nothing has been learned


class OutputLength:
    def __init__(self) -> None:
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []
        self._suffix_sums: list[int] = []

    def observe(self, num_tokens: int) -> None:
        """An answer ended (or its client went away) after so many tokens."""
        self._recent.append(num_tokens)
        insort(self._sorted, num_tokens)
        if len(self._recent) > _WINDOW:
            oldest = self._recent.popleft()
            del self._sorted[bisect_right(self._sorted, oldest) - 1]
        self._suffix_sums = []

    def expected_remaining(self, num_produced: int, cap: int) -> float:
        """Expected further tokens of an answer with `num_produced` of at most `cap` tokens."""
        if not self._sorted:
            return max(1.0, cap * _PRIOR_SHARE - num_produced) if cap > num_produced else 0.0
        if not self._suffix_sums:
            total = 0
            sums = [0]
            for length in reversed(self._sorted):
                total += length
                sums.append(total)
            sums.reverse()
            self._suffix_sums = sums
        first = bisect_right(self._sorted, num_produced)
        longer = len(self._sorted) - first
        # Longer than all that was seen: nothing is known but the cap; take half of what is left.
        mean = self._suffix_sums[first] / longer - num_produced if longer else (cap - num_produced) / 2
        return min(float(cap - num_produced), max(1.0, mean))


    def quantile_remaining(self, quantile: float, num_produced: int, cap: int) -> float:
        """The quantile (0 to 1) of the further tokens of an answer with `num_produced` of at most `cap` tokens."""
        first = bisect_right(self._sorted, num_produced)
        longer = len(self._sorted) - first
        if not longer:
            return float(max(1, cap - num_produced))
        index = min(longer - 1, int(quantile * longer))
        return float(min(cap, self._sorted[first + index]) - num_produced)


def peak_growth(rows: Iterable[tuple[float, int]], block_size: int) -> float:
    """Most blocks that running answers will need at once beyond those they hold now.

    `rows`: (expected remaining tokens, blocks held) of each. Each grows by one token a step until it ends and gives
    everything back, so the need peaks just before one of them ends (the past-future argument of Gong et al., ASPLOS
    2025, in expectation).
    """
    peak = 0.0
    released = 0
    in_order = sorted(rows)
    for ended, (remaining, num_held) in enumerate(in_order):
        peak = max(peak, (len(in_order) - ended) * remaining / block_size - released)
        released += num_held
    return peak
