"""The arithmetic of limits over time: what may flow per minute, and what a calendar day or month holds.

Pure: `now` (monotonic seconds) or Unix seconds are passed in. Levels may go below zero: what has been produced is
charged even where nothing was left for it, and has to flow back before anything new passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

_DAY_S = 86_400
_ROUNDING = 1e-6
Calendar = Literal["day", "month"]


class Bucket:
    """`capacity` a minute, refilled all the time: what was saved up to a minute can be used at once."""

    __slots__ = ("_level", "_time_s", "capacity")

    def __init__(self, capacity: float, now: float) -> None:
        self.capacity = capacity
        self._level = capacity
        self._time_s = now

    def level(self, now: float) -> float:
        if now > self._time_s:
            self._level = min(self.capacity, self._level + (now - self._time_s) * self.capacity / 60.0)
            self._time_s = now
        return self._level

    def wait_s(self, amount: float, now: float) -> float:
        """Until `amount` can be taken; infinite when it never can."""
        if amount > self.capacity:
            return float("inf")
        missing = amount - self.level(now)
        return missing * 60.0 / self.capacity if missing > _ROUNDING else 0.0

    def take(self, amount: float, now: float) -> None:
        """A negative amount gives back."""
        self._level = min(self.capacity, self.level(now) - amount)

    def resized(self, capacity: float, now: float) -> Bucket:
        """Another capacity, and as much used of it as of this one."""
        other = Bucket(capacity, now)
        other.take(self.capacity - self.level(now), now)
        return other


@dataclass(slots=True)
class CalendarSum:
    """What was used in the current day or month, in UTC."""

    calendar: Calendar
    used: float = 0.0
    _window: int = -1

    def current(self, unix_s: float) -> float:
        window = self._index(unix_s)
        if window > self._window:
            self.used, self._window = 0.0, window
        return self.used

    def take(self, amount: float, unix_s: float) -> None:
        """A negative amount gives back, to the window that it was taken from at most."""
        self.used = max(0.0, self.current(unix_s) + amount)

    def restore(self, used: float, unix_s: float) -> None:
        self.current(unix_s)
        self.used = used

    def reset_s(self, unix_s: float) -> float:
        """Seconds until the next window begins."""
        return window_start(self.calendar, unix_s, 1) - unix_s

    def _index(self, unix_s: float) -> int:
        day = int(unix_s // _DAY_S)
        return day if self.calendar == "day" else _month_of(day)


def window_start(calendar: Calendar, unix_s: float, num_later: int = 0) -> float:
    """Unix time at which the current day or month (or one `num_later` after it) began, in UTC."""
    day = int(unix_s // _DAY_S)
    if calendar == "day":
        return float((day + num_later) * _DAY_S)
    return float(_first_day_of(_month_of(day) + num_later) * _DAY_S)


def _month_of(day: int) -> int:
    """Months since year 0 of a day counted from 1970-01-01, in the Gregorian calendar."""
    shifted = day + 719_468  # counted from 0000-03-01, so that leap days come last
    era, of_era = divmod(shifted, 146_097)
    year = (of_era - of_era // 1_460 + of_era // 36_524 - of_era // 146_096) // 365
    of_year = of_era - (365 * year + year // 4 - year // 100)
    return (era * 400 + year) * 12 + (5 * of_year + 2) // 153 + 2


def _first_day_of(month: int) -> int:
    years, of_year = divmod(month - 2, 12)
    era, year = divmod(years, 400)
    return era * 146_097 + 365 * year + year // 4 - year // 100 + (153 * of_year + 2) // 5 - 719_468
