"""ConversationMemory: so that the next turn of a chat begins with the very tokens of the turns before.

A client sends back text, and text that a model has generated need not tokenize to the ids that the model chose; from
the first difference on, nothing of the cache would fit. So the ids of an answered prompt and its answer are kept under
a digest of the rendered conversation up to the end of that answer:

    kept:    <|im_start|> user\\nHi <|im_end|> \\n <|im_start|> assistant\\nHello!            -> the ids, as they were
    asked:   <|im_start|> user\\nHi <|im_end|> \\n <|im_start|> assistant\\nHello! <|im_end|> \\n <|im_start|> ...
             └────────────────── one digest, so these ids ──────────────────┘└──── tokenized as ever ──

The digest covers the segments with their kinds, so text that a user wrote never passes for a special token of the
template, and the namespace, so tenants share nothing. Looked up wherever a special token begins, longest first: a
template that does not end an answer with a special token, or changes the answer's text, is tokenized as ever.

Owns: that memory, bounded in tokens, least recently used first out. Never: blocks; what the cache still has is the
engine's business. Thread-safe.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from threading import Lock

from tidegate.text.tokenizer import Segment, Tokenizer

MAX_TOKENS = 4_000_000
"""16 MB of ids."""
_DIGEST_SIZE = 16
_MAX_CUT_TOKENS = 64  # of an answer's end that a stop string may have cut off


@dataclass(frozen=True, slots=True)
class ConversationStart:
    """A prompt, and what is needed to remember what it is continued with."""

    token_ids: list[int]
    digest: blake2b
    open_text: str


class ConversationMemory:
    def __init__(self, tokenizer: Tokenizer, max_tokens: int = MAX_TOKENS) -> None:
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._entries: OrderedDict[bytes, array[int]] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_tokens(self) -> int:
        """Token ids kept."""
        return self._num_tokens

    def encode(self, segments: Sequence[Segment], namespace: str) -> ConversationStart:
        """The ids of a rendered prompt: those of the longest known beginning, then those of the rest."""
        digest = blake2b(digest_size=_DIGEST_SIZE)
        _add(digest, b"n", namespace)
        ends: list[tuple[int, bytes]] = []
        open_text: list[str] = []
        for place, segment in enumerate(segments):
            if not segment.is_special:
                open_text.append(segment.text)
                continue
            _add(digest, b"t", "".join(open_text))
            open_text.clear()
            ends.append((place, digest.digest()))
            _add(digest, b"s", segment.text)
        place, token_ids = self._longest(ends)
        token_ids += self._tokenizer.encode_rendered(segments[place:])
        return ConversationStart(token_ids, digest, "".join(open_text))

    def remember(self, start: ConversationStart, text: str, output_ids: Sequence[int]) -> None:
        """An answer has ended: its client got `text`, and these ids were generated, stop tokens included."""
        spelled = self._spelling(text, output_ids)
        if not spelled:
            return
        digest = start.digest.copy()
        _add(digest, b"t", start.open_text + text)
        self._keep(digest.digest(), array("i", [*start.token_ids, *spelled]))

    def _longest(self, ends: list[tuple[int, bytes]]) -> tuple[int, list[int]]:
        """The place of the first segment after the longest known beginning, and the ids of that beginning."""
        with self._lock:
            for place, key in reversed(ends):
                entry = self._entries.get(key)
                if entry is not None:
                    self._entries.move_to_end(key)
                    return place, entry.tolist()
        return 0, []

    def _keep(self, key: bytes, token_ids: array[int]) -> None:
        with self._lock:
            known = self._entries.pop(key, None)
            self._num_tokens += len(token_ids) - (len(known) if known is not None else 0)
            self._entries[key] = token_ids
            while self._num_tokens > self._max_tokens:
                self._num_tokens -= len(self._entries.popitem(last=False)[1])

    def _spelling(self, text: str, output_ids: Sequence[int]) -> list[int]:
        """The generated ids that are the answer's text, with what has no text: special tokens that the model chose in
        the midst of it, and went on from. A stop string may have cut the text inside a token: what is left of that
        token is tokenized. Empty when the ids do not give the text."""
        tokenizer = self._tokenizer
        special_ids = tokenizer.special_ids
        ids = list(output_ids)
        while ids and ids[-1] in special_ids:
            ids.pop()
        if tokenizer.decode(ids) == text:
            return ids
        for length in range(len(ids) - 1, max(0, len(ids) - _MAX_CUT_TOKENS), -1):
            whole = tokenizer.decode(ids[:length])
            if text.startswith(whole) and not tokenizer.strips_leading_space:
                return ids[:length] + tokenizer.encode(text[len(whole) :], add_special_tokens=False)
        return []


def _add(digest: blake2b, kind: bytes, text: str) -> None:
    data = text.encode("utf-8", "surrogatepass")
    digest.update(b"%b%d:" % (kind, len(data)))
    digest.update(data)
