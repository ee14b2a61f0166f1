"""Tokenizer: text to token ids and back, for one model.

Owns: the rule that only a chat template (or a caller who says so) can write special tokens. Text that merely looks
like one, typed by a user, is encoded as the characters it is.
Never renders templates and never holds state of a request: every method may be called from any thread, and encode
releases the interpreter lock.

How the rule is kept: besides the reference tokenizer there is a guarded one, equal except that its special tokens go
by private names that are drawn at start and appear in no text. Only `encode_rendered` writes those names.

Decoding is defined as: the bytes of all tokens, joined, then decoded as UTF-8 with U+FFFD for what is malformed.
"""

from __future__ import annotations

import copy
import json
import re
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import tokenizers

from tidegate.config import ConfigError
from tidegate.request import InvalidRequest
from tidegate.text.token_bytes import LengthBound, TokenBytes
from tidegate.text.tokenizer_spec import TokenizerSpec, spec_from_folder, spec_from_gguf

_LONG_TEXT = 10_000


class Segment(NamedTuple):
    """A stretch of rendered prompt: one special token's text, or ordinary text."""

    text: str
    is_special: bool


class Tokenizer:
    """Built once a model, with from_gguf, from_folder or from_path."""

    def __init__(self, spec: TokenizerSpec, *, source: str = "the model") -> None:
        """Raises ConfigError when the `tokenizers` library does not accept the spec."""
        added = spec.model.get("added_tokens", [])
        specials = {entry["content"]: int(entry["id"]) for entry in added if entry["special"] and entry["content"]}
        self._private_names = {text: _private_name() for text in specials}
        self._reference = _load(spec.model, source)
        self._guarded = _load(_renamed(spec.model, self._private_names), source)
        self._special_ids = frozenset(specials.values())
        self._special_texts = tuple(specials)
        longest_first = sorted(specials, key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._bytes = TokenBytes(spec.model, source)
        self._length_bound = LengthBound(spec.model)
        self._bos_id = spec.bos_id
        self._eos_ids = spec.eos_ids
        self.chat_template = spec.chat_template
        self.vocab_size = self._bytes.vocab_size

    @classmethod
    def from_gguf(cls, path: Path) -> Self:
        return cls(spec_from_gguf(path), source=str(path))

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        return cls(spec_from_folder(folder), source=str(folder))

    @classmethod
    def from_path(cls, path: Path) -> Self:
        """A GGUF file, a tokenizer.json, or a folder that holds one of these. Raises ConfigError."""
        if path.name == "tokenizer.json":
            return cls.from_folder(path.parent)
        if not path.is_dir():
            return cls.from_gguf(path)
        if (path / "tokenizer.json").is_file():
            return cls.from_folder(path)
        files = sorted(path.glob("*.gguf"))
        if len(files) != 1:
            raise ConfigError(f"{path} holds no tokenizer: it needs a tokenizer.json or exactly one GGUF file")
        return cls.from_gguf(files[0])

    @property
    def bos_id(self) -> int | None:
        return self._bos_id

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end an answer; the first is the end-of-sequence token."""
        return self._eos_ids

    @property
    def special_ids(self) -> frozenset[int]:
        return self._special_ids

    @property
    def special_texts(self) -> tuple[str, ...]:
        return self._special_texts

    @property
    def strips_leading_space(self) -> bool:
        """Whether decode drops one space at the start of a text (the tokenizer adds one when encoding)."""
        return self._bytes.strips_leading_space

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False, param: str | None = None
    ) -> list[int]:
        """Token ids of `text`. `add_special_tokens` lets the model's own start token come first.

        `parse_special` turns special-token text into special tokens: only for text that its author vouches for.
        Raises InvalidRequest (with `param`) for text that is not Unicode (a lone surrogate).
        """
        tokenizer = self._reference if parse_special else self._guarded
        return _encode(tokenizer, text, add_special_tokens, param)

    def min_num_tokens(self, text: str) -> int:
        """A number of tokens that `text` certainly reaches, to refuse what is far too long without encoding it."""
        return self._length_bound.min_num_tokens(text)

    def split_special(self, text: str) -> list[Segment]:
        """Cut text at special tokens, leftmost and longest first."""
        segments = []
        end = 0
        for match in self._special_pattern.finditer(text):
            if match.start() > end:
                segments.append(Segment(text[end : match.start()], False))
            segments.append(Segment(match[0], True))
            end = match.end()
        if end < len(text):
            segments.append(Segment(text[end:], False))
        return segments

    def encode_rendered(self, segments: Iterable[Segment], *, param: str | None = "messages") -> list[int]:
        """Token ids of a rendered chat. Only segments marked special become special tokens; no start token is added.

        The segments are encoded as one text, so that merges across them are those of the model's reference encoding.
        """
        names = self._private_names
        text = "".join(names[segment.text] if segment.is_special else segment.text for segment in segments)
        return _encode(self._guarded, text, False, param)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the ids. Ids that the vocabulary lacks have none."""
        skip = self._special_ids if skip_special_tokens else frozenset()
        data = b"".join([self._bytes[token_id] for token_id in token_ids if token_id not in skip])
        text = data.decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strips_leading_space else text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes this token adds to the text; empty for an id that the vocabulary lacks."""
        return self._bytes[token_id]

    def token_text(self, token_id: int) -> str:
        """The bytes as text, U+FFFD where they are no whole characters."""
        return self._bytes[token_id].decode("utf-8", "replace")

    def special_text(self, token_id: int | None) -> str:
        """The text by which a chat template names a special token; empty for None."""
        return "" if token_id is None else self.token_text(token_id)


def _private_name() -> str:
    """Twenty private-use characters: no normalizer changes them, and nobody can guess them."""
    return "".join(chr(0xE000 + secrets.randbelow(0x1900)) for _ in range(20))


def _encode(tokenizer: tokenizers.Tokenizer, text: str, add_special_tokens: bool, param: str | None) -> list[int]:
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise InvalidRequest("the text holds a lone surrogate, which is not Unicode text", param=param) from None
    if len(text) < _LONG_TEXT:
        encoding = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    else:  # without offsets, which we do not need: half the time
        encoding = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
    ids: list[int] = encoding.ids
    return ids


def _load(model: dict[str, Any], source: str) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(model, ensure_ascii=False))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"the tokenizer of {source} cannot be loaded: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _renamed(model: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """The same tokenizer with its special tokens under other names: in the vocabulary and as added tokens."""
    renamed = dict(model)
    renamed["added_tokens"] = [
        {**entry, "content": names.get(entry["content"], entry["content"])} for entry in model.get("added_tokens", [])
    ]
    inner = dict(model["model"])
    vocabulary = inner["vocab"]
    if isinstance(vocabulary, dict):
        inner["vocab"] = {names.get(text, text): token_id for text, token_id in vocabulary.items()}
    else:  # unigram: (piece, score) in id order
        inner["vocab"] = [[names.get(text, text), score] for text, score in vocabulary]
    if inner.get("unk_token") in names:
        inner["unk_token"] = names[inner["unk_token"]]
    renamed["model"] = inner
    renamed["post_processor"] = _renamed_processor(model.get("post_processor"), names)
    return renamed


def _renamed_processor(processor: Any, names: dict[str, str]) -> Any:
    """TemplateProcessing names its tokens by keys of its own and carries their ids, so it needs no change; the
    processors that look a token up by its text do."""
    if isinstance(processor, dict) and processor.get("type") in ("RobertaProcessing", "BertProcessing"):
        processor = copy.deepcopy(processor)
        for side in ("sep", "cls"):
            processor[side][0] = names.get(processor[side][0], processor[side][0])
    return processor
