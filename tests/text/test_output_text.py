from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidegate.text.output_text import ChoiceText, TextDelta
from tidegate.text.tokenizer import Tokenizer


def push_all(choice: ChoiceText, ids: list[int], group: int) -> tuple[str, int, str | None, list[int]]:
    """Text, used tokens, stop, offsets of a whole answer, pushed in groups of `group`."""
    deltas = [choice.push(ids[start : start + group]) for start in range(0, len(ids), group)]
    deltas.append(choice.finish())
    stops = [delta.stop for delta in deltas if delta.stop is not None]
    offsets = [offset for delta in deltas for offset in delta.text_offsets]
    assert len(stops) <= 1
    return (
        "".join(delta.text for delta in deltas),
        sum(delta.num_tokens_used for delta in deltas),
        stops[0] if stops else None,
        offsets,
    )


@given(
    text=st.text("ab .é日😀", max_size=30),
    stops=st.lists(st.text("ab .é日", min_size=1, max_size=3), max_size=3),
    group=st.integers(1, 7),
)
def test_the_answer_does_not_depend_on_how_tokens_are_grouped(
    tiny_tokenizer: Tokenizer, text: str, stops: list[str], group: int
) -> None:
    ids = tiny_tokenizer.encode(text)
    grouped = push_all(ChoiceText(tiny_tokenizer, stops=stops), ids, group)
    assert grouped == push_all(ChoiceText(tiny_tokenizer, stops=stops), ids, len(ids) + 1)
    answer, num_used, stop, _ = grouped
    if stop is None:
        assert answer == text and num_used == len(ids)
    else:
        assert text.startswith(answer + stop)
        assert (answer + stop) in tiny_tokenizer.decode(ids[:num_used])
        assert (answer + stop) not in tiny_tokenizer.decode(ids[: num_used - 1])


def test_tokens_after_a_stop_are_neither_sent_nor_counted(tiny_tokenizer: Tokenizer) -> None:
    ids = tiny_tokenizer.encode("xyz!zzz")
    choice = ChoiceText(tiny_tokenizer, stops=["z!"])
    delta = choice.push(ids)
    assert (delta.text, delta.num_tokens_used, delta.stop) == ("xy", 4, "z!")
    assert delta.finished_by_stop
    assert choice.num_tokens == 4
    assert choice.push(ids) == choice.finish() == TextDelta("")


def test_the_stop_is_shown_when_asked_for(tiny_tokenizer: Tokenizer) -> None:
    choice = ChoiceText(tiny_tokenizer, stops=["z!"], include_stop=True)
    assert choice.push(tiny_tokenizer.encode("xyz!zzz")).text == "xyz!"


def test_what_is_held_back_comes_at_the_end(tiny_tokenizer: Tokenizer) -> None:
    choice = ChoiceText(tiny_tokenizer, stops=["STOP"])
    assert choice.push(tiny_tokenizer.encode("a STO")).text == "a "
    assert choice.finish().text == "STO"


def test_an_unfinished_character_comes_at_the_end(tiny_tokenizer: Tokenizer) -> None:
    choice = ChoiceText(tiny_tokenizer)
    assert choice.push(tiny_tokenizer.encode("a日")[:-1]).text == "a"
    assert choice.finish().text == "\ufffd"


def test_an_unfinished_character_can_complete_a_stop(tiny_tokenizer: Tokenizer) -> None:
    choice = ChoiceText(tiny_tokenizer, stops=["\ufffd"])
    assert choice.push(tiny_tokenizer.encode("a日")[:-1]).text == "a"
    assert choice.finish() == TextDelta("", 0, "\ufffd")


def test_a_stop_token_has_no_text_unless_asked_for(tiny_tokenizer: Tokenizer) -> None:
    ids = tiny_tokenizer.encode("ab!")
    stop_id = ids[-1]
    for include, expected in ((False, "ab"), (True, "ab!")):
        choice = ChoiceText(tiny_tokenizer, stop_token_ids=[stop_id], include_stop=include)
        delta = choice.push(ids)
        assert (delta.text, delta.num_tokens_used) == (expected, 3)


def test_stops_count_only_after_min_tokens(tiny_tokenizer: Tokenizer) -> None:
    ids = tiny_tokenizer.encode("xx!xx!xx")
    choice = ChoiceText(tiny_tokenizer, stops=["!"], min_tokens=3)
    delta = choice.push(ids)
    assert (delta.text, delta.num_tokens_used) == ("xx!xx", 6)


def test_offsets_count_the_characters_before_each_token(tiny_tokenizer: Tokenizer) -> None:
    choice = ChoiceText(tiny_tokenizer, stops=["never"])
    assert choice.push(tiny_tokenizer.encode("né!")).text_offsets == [0, 1, 1, 2]
    assert choice.push(tiny_tokenizer.encode("ne")).text_offsets == [3, 4]
