"""TokenBytes: the bytes that each token id adds to a text.

Owns: reading the vocabulary of a tokenizer.json document backwards. Two kinds of vocabulary are understood, those of
byte-level BPE (every byte is written as one printable character) and those of SentencePiece (spaces as U+2581, bytes
as "<0x41>"). Any other decoder is refused with a ConfigError, because streaming needs bytes a token.
"""

from __future__ import annotations

import re
from typing import Any

from tidegate.config import ConfigError

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PLAIN_DECODERS = frozenset({"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"})


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's map from printable characters to bytes: printable bytes stand for themselves, others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet


_ALPHABET = _byte_alphabet()


class TokenBytes:
    """`table[token_id]`; empty for ids outside the vocabulary."""

    def __init__(self, model: dict[str, Any], source: str) -> None:
        """Raises ConfigError for a decoder that is neither byte-level nor SentencePiece-like."""
        decoders = _decoder_steps(model.get("decoder"))
        kinds = {step["type"] for step in decoders}
        self._is_byte_level = "ByteLevel" in kinds
        if not kinds or not kinds <= (_PLAIN_DECODERS | {"ByteLevel"}):
            named = ", ".join(sorted(kinds)) or "none"
            raise ConfigError(f"the tokenizer of {source} has an unsupported decoder: {named}")
        self.strips_leading_space = any(
            (step["type"] == "Strip" and step.get("start") == 1)
            or (step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")
            for step in decoders
        )
        self._tokens: dict[int, str] = _vocabulary(model)
        self._known: dict[int, bytes] = {}
        self.vocab_size = max(self._tokens, default=-1) + 1

    def __getitem__(self, token_id: int) -> bytes:
        data = self._known.get(token_id)
        if data is None:
            token = self._tokens.get(token_id)
            if token is None:  # not remembered: any number may be asked for
                return b""
            data = self._known[token_id] = self._bytes_of(token)
        return data

    def _bytes_of(self, token: str) -> bytes:
        if self._is_byte_level:
            try:
                return bytes([_ALPHABET[char] for char in token])
            except KeyError:  # an added token, written as itself
                return token.encode("utf-8", "replace")
        byte = _BYTE_PIECE.fullmatch(token)
        if byte is not None:
            return bytes([int(byte[1], 16)])
        return token.replace("\u2581", " ").encode("utf-8", "replace")


class LengthBound:
    """The least tokens a text can become, known without encoding it.

    There is no bound (0) when unknown characters may fuse, when special tokens swallow the space around them, or when
    the text is normalized in a way that is not known here to keep its length. NFC at most thirds it (Hangul).
    """

    def __init__(self, model: dict[str, Any]) -> None:
        texts = set(_vocabulary(model).values())
        is_byte_level = "ByteLevel" in {step["type"] for step in _decoder_steps(model.get("decoder"))}
        shrink = _normalizer_shrink(model.get("normalizer"))
        swallows = any(entry["lstrip"] or entry["rstrip"] for entry in model.get("added_tokens", []))
        has_all_bytes = is_byte_level or all(f"<0x{byte:02X}>" in texts for byte in range(256))
        self._dropped = bytes(byte for char, byte in _ALPHABET.items() if is_byte_level and char not in texts)
        self._most_bytes = 0
        if shrink and has_all_bytes and not swallows:
            self._most_bytes = shrink * max((_num_bytes(text, is_byte_level) for text in texts), default=0)

    def min_num_tokens(self, text: str) -> int:
        if not self._most_bytes:
            return 0
        # Byte-level vocabularies may lack bytes that are rare in text; these vanish when encoded.
        num_bytes = len(text.encode("utf-8", "replace").translate(None, self._dropped))
        return -(-num_bytes // self._most_bytes)


def _normalizer_shrink(normalizer: Any) -> int:
    """By how much a normalizer may shorten a text, in bytes; 0 where that is not known."""
    steps = normalizer["normalizers"] if normalizer and normalizer["type"] == "Sequence" else [normalizer]
    shrink = 1
    for step in filter(None, steps):
        if step["type"] == "NFC":
            shrink *= 3
        elif step["type"] != "Prepend" and step.get("content") != "\u2581":
            return 0
    return shrink


def _num_bytes(token: str, is_byte_level: bool) -> int:
    if is_byte_level and all(char in _ALPHABET for char in token):
        return len(token)
    return len(token.replace("\u2581", " ").encode("utf-8", "replace"))


def _decoder_steps(decoder: Any) -> list[dict[str, Any]]:
    if not isinstance(decoder, dict):
        return []
    return list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]


def _vocabulary(model: dict[str, Any]) -> dict[int, str]:
    entries = model["model"]["vocab"]
    if isinstance(entries, dict):
        tokens = {int(token_id): str(token) for token, token_id in entries.items()}
    else:
        tokens = {token_id: str(entry[0]) for token_id, entry in enumerate(entries)}
    tokens.update({int(entry["id"]): str(entry["content"]) for entry in model.get("added_tokens", [])})
    return tokens
