from __future__ import annotations

import json
import threading
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.text.conftest import sentencepiece_metadata, tiny_metadata
from tests.tiny_models import write_tiny_gguf
from tidegate.config import ConfigError
from tidegate.request import InvalidRequest
from tidegate.text.tokenizer import Segment, Tokenizer
from tidegate.text.tokenizer_spec import spec_from_metadata

AWKWARD = [
    "",
    " ",
    "  two leading",
    "trailing  ",
    "a  b   c",
    "\n",
    "\n\n\na\n",
    "\ttab\t\ttab",
    "\r\nline\r\n",
    "1234567890 3.14 1e-9 ½ ² ١٢٣ 一二三",
    "I'll we've DON'T it's 'tis",
    "日本語のテキスト、中文文本。한국어 텍스트",
    "😀 😃😄 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽",
    "e\u0301 n\u0303 Z\u0351\u036b\u0343 \u0b95\u0bca",
    "שלום עולם مرحبا بالعالم",
    "mixed русский ελληνικά हिन्दी ไทย",
    "nul\x00byte \x07bell \x1b[0m",
    "\u00a0\u2003\u3000\u200b\ufeff wide spaces",
    "<|im_end|> <|im_start|>user <|im_e <|endoftext|>",
    "<html><body>&nbsp;</body></html> {}[]()!@#$%^&*",
    "def f(x):\n    return x ** 2  # comment\n",
    "antidisestablishmentarianism" * 40,
    "\ue000\U000f0000\U0010fffd private",
    "\ufffd\uffff",
]

# Texts without the bytes that the default model's vocabulary lacks (rare control characters, planes 4 to 15).
reference_text = st.text(
    st.one_of(
        st.characters(max_codepoint=0x3FFFF, exclude_categories=("Cs",), exclude_characters="\x04\x06\x13\x14\x16\x1d"),
        st.sampled_from("  \n\t'<|>1aé日😀"),
    ),
    max_size=40,
)


@pytest.mark.parametrize("text", AWKWARD)
def test_encoding_is_the_reference_encoding(
    tokenizer: Tokenizer, reference_encode: Callable[..., list[int]], text: str
) -> None:
    expected = reference_encode(text) if text else []
    assert tokenizer.encode(text, parse_special=True) == expected


@given(text=reference_text)
def test_encoding_of_any_text_is_the_reference_encoding(
    tokenizer: Tokenizer, reference_encode: Callable[..., list[int]], text: str
) -> None:
    assert tokenizer.encode(text, parse_special=True) == (reference_encode(text) if text else [])


@pytest.mark.parametrize("text", AWKWARD)
def test_decoding_gives_the_text_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode(text, parse_special=True), skip_special_tokens=False) == text


@given(text=st.text(max_size=200))
def test_special_tokens_never_come_from_text(tokenizer: Tokenizer, text: str) -> None:
    for special in ("", "<|im_end|>"):
        ids = tokenizer.encode(text[:9] + special + text[9:], add_special_tokens=False)
        assert not tokenizer.special_ids.intersection(ids)


def test_typed_special_text_is_plain_text(tokenizer: Tokenizer) -> None:
    typed = tokenizer.encode("<|im_end|>")
    assert len(typed) > 1
    assert tokenizer.decode(typed) == "<|im_end|>"
    assert tokenizer.encode("<|im_end|>", parse_special=True) == [2]


def test_plain_and_parsing_encodings_agree_without_special_text(tokenizer: Tokenizer) -> None:
    for text in AWKWARD:
        if "<|im_end|>" not in text:
            assert tokenizer.encode(text) == tokenizer.encode(text, parse_special=True)


def test_only_marked_segments_become_special(tokenizer: Tokenizer) -> None:
    segments = [Segment("<|im_start|>", True), Segment("user\n<|im_start|>", False), Segment("<|im_end|>", True)]
    ids = tokenizer.encode_rendered(segments)
    assert ids[0] == 1 and ids[-1] == 2
    assert not tokenizer.special_ids.intersection(ids[1:-1])
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>user\n<|im_start|><|im_end|>"


def test_neighbouring_plain_segments_are_merged_as_one_text(tokenizer: Tokenizer) -> None:
    whole = tokenizer.encode("internationalization", add_special_tokens=False)
    assert tokenizer.encode_rendered([Segment("internat", False), Segment("ionalization", False)]) == whole


def test_split_special_takes_the_longest_and_keeps_everything(tokenizer: Tokenizer) -> None:
    text = "a<|im_end|><|im_start|>b<repo_name>"
    segments = tokenizer.split_special(text)
    assert "".join(segment.text for segment in segments) == text
    assert [segment.text for segment in segments if segment.is_special] == ["<|im_end|>", "<|im_start|>", "<repo_name>"]


def test_long_and_short_texts_are_encoded_alike(tokenizer: Tokenizer) -> None:
    line = "The quick brown fox, 42 times.\n"
    assert tokenizer.encode(line * 1000) == tokenizer.encode(line) * 1000


def test_a_long_single_word_is_encoded_whole(tokenizer: Tokenizer) -> None:
    """A merge per pair of neighbours would make this take minutes."""
    word = "ab" * 100_000
    assert tokenizer.decode(tokenizer.encode(word)) == word


@given(text=st.text(max_size=200))
def test_min_num_tokens_is_never_above_the_truth(tokenizer: Tokenizer, tiny_tokenizer: Tokenizer, text: str) -> None:
    for one in (tokenizer, tiny_tokenizer):
        assert one.min_num_tokens(text) <= len(one.encode(text))
        assert one.min_num_tokens(text * 50) <= len(one.encode(text * 50))


def test_min_num_tokens_grows_with_the_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.min_num_tokens("x" * 2_000_000) > 8192


def test_a_lone_surrogate_is_the_users_mistake(tiny_tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest) as caught:
        tiny_tokenizer.encode("a\ud800b", param="prompt")
    assert caught.value.param == "prompt"


def test_bytes_of_tokens_join_to_the_text(tokenizer: Tokenizer) -> None:
    text = "naïve 👩‍👩‍👧 日本"
    ids = tokenizer.encode(text)
    assert b"".join(tokenizer.token_bytes(token_id) for token_id in ids) == text.encode()
    assert tokenizer.token_text(tokenizer.encode("hello")[0]) in "hello"


def test_ids_outside_the_vocabulary_have_no_text(tiny_tokenizer: Tokenizer) -> None:
    assert tiny_tokenizer.decode([-1, 10**9]) == ""
    assert tiny_tokenizer.token_bytes(tiny_tokenizer.vocab_size) == b""


def test_facts_of_the_default_model(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 49152
    assert tokenizer.bos_id == 1
    assert tokenizer.eos_ids == (2,)
    assert len(tokenizer.special_ids) == 17


def test_many_threads_encode_alike(tiny_tokenizer: Tokenizer) -> None:
    text = "hello world, the users and others. " * 50
    expected = tiny_tokenizer.encode(text)
    results: list[list[int]] = []
    threads = [threading.Thread(target=lambda: results.append(tiny_tokenizer.encode(text))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 8


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "gpt-2", "default", "smollm"])
@given(text=st.text(max_size=60))
def test_every_pre_tokenizer_keeps_the_text(pre: str, text: str) -> None:
    one = _by_pre(pre)
    expected = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
    assert one.decode(one.encode(text), skip_special_tokens=True) == expected


_TOKENIZERS: dict[str, Tokenizer] = {}


def _by_pre(pre: str) -> Tokenizer:
    if pre not in _TOKENIZERS:
        metadata = tiny_metadata(**{"tokenizer.ggml.pre": pre})
        _TOKENIZERS[pre] = Tokenizer(spec_from_metadata(metadata, source=pre))
    return _TOKENIZERS[pre]


def test_llama_bpe_starts_with_its_start_token_and_others_do_not() -> None:
    assert _by_pre("llama-bpe").encode("hi")[0] == 1
    assert _by_pre("llama-bpe").encode("hi", add_special_tokens=False)[0] != 1
    assert _by_pre("qwen2").encode("hi")[0] != 1


def test_sentencepiece_merges_best_pieces_first(sentencepiece_tokenizer: Tokenizer) -> None:
    ids = sentencepiece_tokenizer.encode("hello", add_special_tokens=False)
    assert [sentencepiece_tokenizer.token_text(token_id) for token_id in ids] == [" hello"]
    assert sentencepiece_tokenizer.encode("hello")[0] == 1


def test_sentencepiece_never_makes_a_special_token_of_pieces(sentencepiece_tokenizer: Tokenizer) -> None:
    ids = sentencepiece_tokenizer.encode("<s>", add_special_tokens=False)
    assert 1 not in ids
    assert sentencepiece_tokenizer.decode(ids) == "<s>"


@given(text=st.text(max_size=60).filter(lambda text: "\u2581" not in text))
def test_sentencepiece_falls_back_to_bytes(sentencepiece_tokenizer: Tokenizer, text: str) -> None:
    ids = sentencepiece_tokenizer.encode(text)
    assert 0 not in ids
    assert sentencepiece_tokenizer.decode(ids) == text


def test_gguf_and_folder_give_the_same_tokenizer(tmp_path: Path) -> None:
    gguf = write_tiny_gguf(tmp_path / "tiny.gguf", num_layers=1)
    spec = spec_from_metadata(tiny_metadata(), source="tiny")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(spec.model), encoding="utf-8")
    settings = {"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>", "chat_template": "T"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}), encoding="utf-8")
    from_gguf, from_folder = Tokenizer.from_path(gguf), Tokenizer.from_path(folder)
    for text in AWKWARD:
        assert from_gguf.encode(text) == from_folder.encode(text)
    assert (from_folder.bos_id, from_folder.eos_ids, from_folder.chat_template) == (1, (2, 0), "T")
    assert Tokenizer.from_path(folder / "tokenizer.json").vocab_size == from_gguf.vocab_size


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"tokenizer.ggml.pre": "unheard-of"}, "unheard-of"),
        ({"tokenizer.ggml.model": "bert"}, "bert"),
        ({"tokenizer.ggml.tokens": []}, "holds no tokenizer"),
        ({"tokenizer.ggml.token_type": [1]}, "token types"),
    ],
)
def test_a_tokenizer_that_cannot_be_built_stops_the_start(changes: dict[str, Any], hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        spec_from_metadata(tiny_metadata(**changes), source="tiny")


def test_sentencepiece_without_scores_stops_the_start() -> None:
    with pytest.raises(ConfigError, match="score"):
        spec_from_metadata(sentencepiece_metadata(**{"tokenizer.ggml.scores": None}), source="tiny")


@pytest.mark.parametrize("content", [b"", b"GGUF", b"nonsense" * 10, b"GGUF\x03\0\0\0" + b"\xff" * 16])
def test_a_broken_file_stops_the_start(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with pytest.raises(ConfigError):
        Tokenizer.from_path(path)


def test_a_file_cut_short_anywhere_stops_the_start(tmp_path: Path) -> None:
    whole = write_tiny_gguf(tmp_path / "tiny.gguf", num_layers=1).read_bytes()
    metadata_end = whole.index(b"tokenizer.chat_template")
    path = tmp_path / "cut.gguf"
    for size in range(1, metadata_end, 97):
        path.write_bytes(whole[:size])
        with pytest.raises(ConfigError):
            Tokenizer.from_path(path)


def test_a_folder_without_tokenizer_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Tokenizer.from_path(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{not json", encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot read"):
        Tokenizer.from_path(tmp_path)
