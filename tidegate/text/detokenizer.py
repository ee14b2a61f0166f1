"""IncrementalDetokenizer: the text of a growing list of tokens, a piece at a time.

Owns: holding back the bytes of a character that is not whole yet (at most three). Never decodes a token twice, so the
cost is constant a token.
Invariant: whatever the grouping of pushes, what they and flush returned, joined, is Tokenizer.decode of all the ids
(except for the leading space, see `continues_text`).
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from tidegate.text.tokenizer import Tokenizer

_UTF8 = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """For one choice. `continues_text` keeps a leading space that decode would drop: the answer goes on after a prompt
    that is part of the same text (completions), instead of starting a text (chat)."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, continues_text: bool = False) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skipped: frozenset[int] = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = _UTF8("replace")
        self._drop_space = tokenizer.strips_leading_space and not continues_text

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete; empty while a character is not whole."""
        data = b"".join([self._token_bytes(token_id) for token_id in token_ids if token_id not in self._skipped])
        return self._without_leading_space(self._decoder.decode(data))

    def flush(self) -> str:
        """The end: bytes that never became a character, as U+FFFD. Nothing may be pushed after it."""
        return self._without_leading_space(self._decoder.decode(b"", final=True))

    def _without_leading_space(self, text: str) -> str:
        if self._drop_space and text:
            self._drop_space = False
            return text.removeprefix(" ")
        return text
