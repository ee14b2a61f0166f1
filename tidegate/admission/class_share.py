"""Who gets the prefill when there is not enough of it: the share of long prompts in what has been admitted lately.

One long prompt costs as much as dozens of short ones. While requests are being refused for want of time, long prompts
are held to a share of the prompt tokens, so that they go on being served but do not take the place of all the others.
"""

from __future__ import annotations

import math

_MEMORY_TOKENS = 50_000.0  # admitted prompt tokens after which an old one has faded to 1/e
_CONTENTION_S = 10.0


class ClassShare:
    def __init__(self) -> None:
        self._long = 0.0
        self._all = 0.0
        self._contended_until_s = -math.inf

    def admitted(self, num_tokens: int, *, is_long: bool) -> None:
        fade = math.exp(-num_tokens / _MEMORY_TOKENS)
        self._long = self._long * fade + (num_tokens if is_long else 0)
        self._all = self._all * fade + num_tokens

    def refused(self, now: float) -> None:
        """A request could not be served in time (for another reason than this share)."""
        self._contended_until_s = now + _CONTENTION_S

    def long_share(self, now: float) -> float:
        """Share of prompt tokens that long prompts got lately; 0 when nobody had to be refused."""
        return self._long / self._all if self._all > 0.0 and now < self._contended_until_s else 0.0
