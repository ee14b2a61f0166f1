"""ChoiceText: from the token ids of one choice to the text that may be sent.

Owns: the join of detokenizer and stop strings, and the count of tokens that belong to the answer: tokens after the one
that completes a stop string are neither sent nor counted.
Never decides when a choice ends for another reason; the engine does that by token id.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from tidegate.text.detokenizer import IncrementalDetokenizer
from tidegate.text.stop_strings import StopStrings
from tidegate.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What a push brought.

    num_tokens_used: how many of the pushed tokens belong to the answer. stop: the stop string that ended it, or None.
    text_offsets: for each used token, the characters of the choice's decoded text before it.
    """

    text: str
    num_tokens_used: int = 0
    stop: str | None = None
    text_offsets: list[int] = field(default_factory=list)

    @property
    def finished_by_stop(self) -> bool:
        return self.stop is not None


class ChoiceText:
    """`stop_token_ids` end the choice in the engine; their text is not part of the answer, unless `include_stop`.

    Stop strings must lie wholly after the first `min_tokens` tokens. `continues_text`: see IncrementalDetokenizer.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        stop_token_ids: Collection[int] = (),
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        continues_text: bool = False,
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, skip_special_tokens=skip_special_tokens, continues_text=continues_text
        )
        self._stops = StopStrings(stops, include_in_output=include_stop)
        self._hidden_ids = frozenset() if include_stop else frozenset(stop_token_ids)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._num_chars = 0
        self._is_finished = False

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer so far."""
        return self._num_tokens

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """After a stop was found or finish was called, nothing is used any more."""
        if self._is_finished:
            return TextDelta("")
        pieces: list[str] = []
        offsets: list[int] = []
        for token_id in token_ids:
            offsets.append(self._num_chars)
            self._num_tokens += 1
            text = "" if token_id in self._hidden_ids else self._detokenizer.push((token_id,))
            stop = self._emit(text, pieces)
            if stop is not None:
                self._is_finished = True
                return TextDelta("".join(pieces), len(offsets), stop, offsets)
        return TextDelta("".join(pieces), len(offsets), None, offsets)

    def finish(self) -> TextDelta:
        """The engine ended the choice: what is still held back. An unfinished character may complete a stop."""
        if self._is_finished:
            return TextDelta("")
        self._is_finished = True
        pieces: list[str] = []
        stop = self._emit(self._detokenizer.flush(), pieces)
        pieces.append(self._stops.flush())
        return TextDelta("".join(pieces), 0, stop)

    def _emit(self, text: str, pieces: list[str]) -> str | None:
        self._num_chars += len(text)
        if self._num_tokens <= self._min_tokens:
            pieces.append(text)
            return None
        match = self._stops.push(text)
        pieces.append(match.text)
        return match.matched
