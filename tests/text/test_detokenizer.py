from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.text.detokenizer import IncrementalDetokenizer
from tidegate.text.tokenizer import Tokenizer

HARD_TEXTS = [
    "日本語のテキスト 中文 한국어",
    "😀👩‍👩‍👧‍👦🏳️‍🌈👍🏽 flags 🇫🇷🇯🇵",
    "e\u0301 Z\u0351\u036b\u0343\u036a क्षि ไทย",
    " leading and trailing ",
    "שלום مرحبا",
    "\x00\x01 nul",
]


def stream(tokenizer: Tokenizer, ids: list[int], cuts: list[int], **options: bool) -> str:
    """Push the ids in groups that end at `cuts`."""
    detokenizer = IncrementalDetokenizer(tokenizer, **options)
    ends = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return "".join(detokenizer.push(ids[start:end]) for start, end in pairwise(ends)) + detokenizer.flush()


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_a_token_at_a_time_gives_the_whole_text(tokenizer: Tokenizer, tiny_tokenizer: Tokenizer, text: str) -> None:
    for one in (tokenizer, tiny_tokenizer):
        ids = one.encode(text)
        assert stream(one, ids, list(range(len(ids)))) == text


@given(ids=st.lists(st.integers(0, 49151), max_size=60), cuts=st.lists(st.integers(0, 60)), skip=st.booleans())
def test_any_ids_in_any_groups_stream_to_what_the_reference_decodes(
    tokenizer: Tokenizer, ids: list[int], cuts: list[int], skip: bool
) -> None:
    expected = tokenizer._reference.decode(ids, skip_special_tokens=skip)
    assert tokenizer.decode(ids, skip_special_tokens=skip) == expected
    assert stream(tokenizer, ids, cuts, skip_special_tokens=skip) == expected


@given(ids=st.lists(st.integers(0, 270), max_size=60), cuts=st.lists(st.integers(0, 60)), skip=st.booleans())
def test_single_bytes_stream_to_what_the_reference_decodes(
    tiny_tokenizer: Tokenizer, ids: list[int], cuts: list[int], skip: bool
) -> None:
    expected = tiny_tokenizer._reference.decode(ids, skip_special_tokens=skip)
    assert tiny_tokenizer.decode(ids, skip_special_tokens=skip) == expected
    assert stream(tiny_tokenizer, ids, cuts, skip_special_tokens=skip) == expected


@given(ids=st.lists(st.integers(0, 275), max_size=40), cuts=st.lists(st.integers(0, 40)), skip=st.booleans())
def test_sentencepiece_ids_stream_to_what_decode_gives(
    sentencepiece_tokenizer: Tokenizer, ids: list[int], cuts: list[int], skip: bool
) -> None:
    expected = sentencepiece_tokenizer.decode(ids, skip_special_tokens=skip)
    assert stream(sentencepiece_tokenizer, ids, cuts, skip_special_tokens=skip) == expected


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_sentencepiece_decodes_text_as_the_reference_does(sentencepiece_tokenizer: Tokenizer, text: str) -> None:
    ids = sentencepiece_tokenizer.encode(text)
    assert sentencepiece_tokenizer.decode(ids) == sentencepiece_tokenizer._reference.decode(ids) == text


def test_nothing_is_emitted_before_a_character_is_whole(tiny_tokenizer: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(tiny_tokenizer)
    ids = tiny_tokenizer.encode("😀")
    assert [detokenizer.push([token_id]) for token_id in ids] == ["", "", "", "😀"]
    assert detokenizer.flush() == ""


def test_leftover_bytes_become_one_replacement_character(tiny_tokenizer: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(tiny_tokenizer)
    assert detokenizer.push(tiny_tokenizer.encode("a😀")[:-1]) == "a"
    assert detokenizer.flush() == "\ufffd"


def test_a_character_is_not_held_back_once_whole(tiny_tokenizer: Tokenizer) -> None:
    """Combining marks and joiners may follow, but they are characters of their own."""
    detokenizer = IncrementalDetokenizer(tiny_tokenizer)
    assert detokenizer.push(tiny_tokenizer.encode("e")) == "e"
    assert detokenizer.push(tiny_tokenizer.encode("\u0301")) == "\u0301"


def test_special_tokens_are_shown_only_when_asked_for(tiny_tokenizer: Tokenizer) -> None:
    ids = [*tiny_tokenizer.encode("hi"), 2]
    assert stream(tiny_tokenizer, ids, [1]) == "hi"
    assert stream(tiny_tokenizer, ids, [1], skip_special_tokens=False) == "hi<|im_end|>"


def test_the_first_space_stays_when_the_text_continues_a_prompt(sentencepiece_tokenizer: Tokenizer) -> None:
    ids = sentencepiece_tokenizer.encode("hello hello", add_special_tokens=False)
    assert stream(sentencepiece_tokenizer, ids, [1]) == "hello hello"
    assert stream(sentencepiece_tokenizer, ids, [1], continues_text=True) == " hello hello"
