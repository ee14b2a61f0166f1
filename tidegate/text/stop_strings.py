"""StopStrings: finds the first stop string in text that arrives in pieces.

Owns: which characters may be emitted now. Held back is exactly the longest end of the text that begins some stop
string, no more. Never emits anything after a stop, nor the stop itself unless asked to.

Which stop matches is a property of the text alone, not of the pieces: the one that is complete first; of those that
end at the same character, the longest. Cost is linear in the text, whatever the number of stop strings: one
Aho-Corasick automaton (https://doi.org/10.1145/360825.360855), whose state is the length held back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from tidegate.request import InvalidRequest

MAX_STOP_STRINGS = 32
MAX_STOP_CHARS = 4096


def check_stop_strings(stops: Sequence[str]) -> None:
    """Raises InvalidRequest for more, or longer, stop strings than a request may have, and for empty ones."""
    if len(stops) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"stop holds {len(stops)} strings; at most {MAX_STOP_STRINGS} are allowed", param="stop")
    if sum(map(len, stops)) > MAX_STOP_CHARS:
        raise InvalidRequest(f"stop strings may have {MAX_STOP_CHARS} characters in all", param="stop")
    if not all(stops):
        raise InvalidRequest("stop must not hold an empty string", param="stop")


class StopMatch(NamedTuple):
    """Text that may be emitted now, and the stop string that ended the text, if one did."""

    text: str
    matched: str | None


class StopStrings:
    """For one choice. After a match, or flush, nothing more is emitted."""

    def __init__(self, stops: Sequence[str], *, include_in_output: bool = False) -> None:
        self._automaton = _automaton(tuple(stops))
        self._include = include_in_output
        self._state = 0
        self._held = ""
        self._ended = False

    def push(self, text: str) -> StopMatch:
        if self._ended:
            return StopMatch("", None)
        automaton, state = self._automaton, self._state
        for index, char in enumerate(text):
            state = automaton.next_state(state, char)
            matched = automaton.matches[state]
            if matched is not None:
                self._ended = True
                known = self._held + text[: index + 1]
                self._held = ""
                return StopMatch(known if self._include else known[: len(known) - len(matched)], matched)
        self._state = state
        known = self._held + text
        num_safe = len(known) - automaton.depths[state]
        self._held = known[num_safe:]
        return StopMatch(known[:num_safe], None)

    def flush(self) -> str:
        """The end of the text: what was held back can no longer become a stop."""
        held, self._held, self._ended = self._held, "", True
        return held


class _Automaton:
    """States are the prefixes of stop strings, state 0 the empty one.

    depths[s]: length of the prefix. fallbacks[s]: the longest proper suffix of it that is a prefix too.
    matches[s]: the longest stop string that it ends with.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._edges: list[dict[str, int]] = [{}]
        self.depths = [0]
        self.matches: list[str | None] = [None]
        for stop in stops:
            self._add(stop)
        self._fallbacks = [0] * len(self._edges)
        self._link()

    def _add(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self._edges[state]:
                self._edges[state][char] = len(self._edges)
                self._edges.append({})
                self.depths.append(self.depths[state] + 1)
                self.matches.append(None)
            state = self._edges[state][char]
        if state:
            self.matches[state] = stop

    def _link(self) -> None:
        """Breadth first, so that a state's fallback, which is shorter, is linked before it."""
        waiting = deque(self._edges[0].values())
        while waiting:
            state = waiting.popleft()
            for char, child in self._edges[state].items():
                self._fallbacks[child] = self.next_state(self._fallbacks[state], char)
                waiting.append(child)
            if self.matches[state] is None:
                self.matches[state] = self.matches[self._fallbacks[state]]

    def next_state(self, state: int, char: str) -> int:
        edges = self._edges
        while state and char not in edges[state]:
            state = self._fallbacks[state]
        return edges[state].get(char, 0)


@lru_cache(maxsize=16)
def _automaton(stops: tuple[str, ...]) -> _Automaton:
    """Shared by the choices of a request, and by requests with the same stops. It is not changed once built."""
    return _Automaton(stops)
