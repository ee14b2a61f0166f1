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


def most_bytes_per_token(model: dict[str, Any]) -> int | None:
    """The most bytes of input that one token can stand for; None where there is no such bound.

    There is none when unknown characters may vanish or fuse, when special tokens swallow the space around them, or
    when the text is normalized in a way that is not known here to keep its length. NFC at most thirds it (Hangul).
    """
    tokens = _vocabulary(model)
    texts = set(tokens.values())
    byte_level = all(char in texts for char in _ALPHABET)
    if not byte_level and not all(f"<0x{byte:02X}>" in texts for byte in range(256)):
        return None
    if any(entry["lstrip"] or entry["rstrip"] for entry in model.get("added_tokens", [])):
        return None
    shrink = 1
    normalizer = model.get("normalizer")
    steps = normalizer["normalizers"] if normalizer and normalizer["type"] == "Sequence" else [normalizer]
    for step in filter(None, steps):
        if step["type"] == "NFC":
            shrink *= 3
        elif step["type"] != "Prepend" and step.get("content") != "\u2581":
            return None
    if byte_level:
        return shrink * max(len(text) if set(text) <= _ALPHABET.keys() else len(text.encode()) for text in texts)
    return shrink * max(len(text.replace("\u2581", " ").encode("utf-8", "replace")) for text in texts)


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
