from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.request import InvalidRequest
from tidegate.text.stop_strings import MAX_STOP_CHARS, MAX_STOP_STRINGS, StopStrings, check_stop_strings


def naive(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Where the first stop to be complete ends, and which; the longest of those that end there."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return end, max(ending, key=len)
    return None


def run(text: str, stops: list[str], sizes: list[int], include: bool) -> tuple[list[str], str | None]:
    matcher = StopStrings(stops, include_in_output=include)
    emitted: list[str] = []
    matched = None
    while text:
        size = sizes.pop() if sizes else 1
        piece, text = text[:size], text[size:]
        match = matcher.push(piece)
        emitted.append(match.text)
        matched = matched or match.matched
    emitted.append(matcher.flush())
    return emitted, matched


letters = st.text("ab\u00e9", max_size=30)
stop_lists = st.lists(st.text("ab\u00e9", min_size=1, max_size=5), max_size=5)


@given(text=letters, stops=stop_lists, sizes=st.lists(st.integers(1, 6)), include=st.booleans())
def test_the_result_does_not_depend_on_the_pieces(text: str, stops: list[str], sizes: list[int], include: bool) -> None:
    emitted, matched = run(text, stops, sizes, include)
    expected = naive(text, stops)
    if expected is None:
        assert ("".join(emitted), matched) == (text, None)
    else:
        end, stop = expected
        assert matched == stop
        assert "".join(emitted) == (text[:end] if include else text[: end - len(stop)])


@given(text=letters, stops=stop_lists)
def test_only_the_beginning_of_a_stop_is_held_back(text: str, stops: list[str]) -> None:
    matcher = StopStrings(stops)
    seen = emitted = ""
    for char in text:
        match = matcher.push(char)
        seen, emitted = seen + char, emitted + match.text
        if match.matched:
            return
        held = seen[len(emitted) :]
        beginnings = [
            length for length in range(1, len(seen) + 1) if any(stop.startswith(seen[-length:]) for stop in stops)
        ]
        assert len(held) == max(beginnings, default=0)


def test_a_stop_across_many_pieces_is_found() -> None:
    matcher = StopStrings(["\n\nUser:"])
    texts = [matcher.push(piece) for piece in ("Hello", ".\n", "\nUs", "er", ": hi")]
    assert [match.text for match in texts] == ["Hello", ".", "", "", ""]
    assert texts[-1].matched == "\n\nUser:"


def test_held_back_text_comes_out_when_it_is_no_stop() -> None:
    matcher = StopStrings(["STOP"])
    assert [matcher.push(piece).text for piece in ("a S", "TO", "RE")] == ["a ", "", "STORE"]


def test_nothing_comes_after_a_stop() -> None:
    matcher = StopStrings(["."])
    assert matcher.push("a.b").text == "a"
    assert matcher.push("c.") == ("", None)
    assert matcher.flush() == ""


def test_of_stops_that_end_together_the_longest_counts() -> None:
    assert StopStrings(["b", "ab"]).push("xab") == ("x", "ab")
    assert StopStrings(["ab", "b"]).push("xab") == ("x", "ab")


def test_the_stop_that_is_complete_first_counts() -> None:
    assert StopStrings(["abcd", "bc"]).push("abcd") == ("a", "bc")


def test_thousands_of_stops_over_a_long_text() -> None:
    """Comparing each stop at each character would take minutes."""
    stops = ["a" * 20 + str(number) for number in range(10_000)]
    matcher = StopStrings(stops)
    text = "a" * 300_000
    assert matcher.push(text) == (text[20:], None)
    assert matcher.push("9999!") == ("", "a" * 20 + "9")


@pytest.mark.parametrize("stops", [["x"] * (MAX_STOP_STRINGS + 1), ["x" * (MAX_STOP_CHARS + 1)], [""], ["x"] * 10_000])
def test_too_many_too_long_and_empty_stops_are_refused(stops: list[str]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_stop_strings(stops)
    assert caught.value.param == "stop"


def test_as_many_stops_as_are_allowed_are_accepted() -> None:
    check_stop_strings(["x" * (MAX_STOP_CHARS // MAX_STOP_STRINGS)] * MAX_STOP_STRINGS)
    check_stop_strings([])
