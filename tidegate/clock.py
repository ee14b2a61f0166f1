"""Time, as a value that is passed in.

The core never reads a clock: every verb takes `now`, in seconds. Only the shells (server, worker loop, simulator)
hold a Clock. RealClock is CLOCK_MONOTONIC, which on Linux is one clock for all processes of a machine, so that
timestamps taken in a worker and in the frontend can be subtracted.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds from an arbitrary start; never goes back."""
        ...


class RealClock:
    def now(self) -> float:
        return time.monotonic()


class SimClock:
    """A clock that stands still until the simulator moves it."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance_to(self, time_s: float) -> None:
        """Raises ValueError when asked to go back."""
        if time_s < self._now_s:
            raise ValueError(f"clock cannot go back from {self._now_s} s to {time_s} s")
        self._now_s = time_s
