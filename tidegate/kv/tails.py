"""Blocks by how they begin: for a prefix that ends, or goes on differently, inside a block.

Such a block cannot be shared, but its start can be copied into a block of one's own. Found by (hash of what lies
before it, first token); the best of the newest few in that class is taken, so a lookup stays cheap however many
conversations start alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

_MAX_COMPARED = 16


class TailIndex:
    def __init__(self) -> None:
        self._blocks: dict[tuple[bytes, int], dict[int, list[int]]] = {}
        self._place: dict[int, tuple[bytes, int]] = {}

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._place

    def add(self, block_id: int, parent_hash: bytes, token_ids: list[int]) -> None:
        """`block_id` now begins with these computed tokens (at least one); replaces what was known of it."""
        self.remove(block_id)
        place = (parent_hash, token_ids[0])
        self._place[block_id] = place
        self._blocks.setdefault(place, {})[block_id] = token_ids

    def remove(self, block_id: int) -> None:
        place = self._place.pop(block_id, None)
        if place is not None:
            blocks = self._blocks[place]
            del blocks[block_id]
            if not blocks:
                del self._blocks[place]

    def shorter(self, parent_hash: bytes, token_ids: list[int]) -> list[int]:
        """Blocks known to begin with a proper start of `token_ids` and to hold nothing else, of the newest few."""
        return [
            block_id
            for block_id, tokens in self._newest(parent_hash, token_ids)
            if len(tokens) < len(token_ids) and token_ids[: len(tokens)] == tokens
        ]

    def longer(self, parent_hash: bytes, token_ids: list[int]) -> list[int]:
        """Blocks known to begin with all of `token_ids` and more, of the newest few."""
        return [
            block_id
            for block_id, tokens in self._newest(parent_hash, token_ids)
            if len(tokens) > len(token_ids) and tokens[: len(token_ids)] == token_ids
        ]

    def match(self, parent_hash: bytes, token_ids: list[int]) -> tuple[int, int]:
        """The block that begins with the most of `token_ids`, and with how many. (-1, 0) when there is none."""
        best, best_length = -1, 0
        for block_id, tokens in self._newest(parent_hash, token_ids):
            length = _common_length(tokens, token_ids)
            if length > best_length:
                best, best_length = block_id, length
        return best, best_length

    def _newest(self, parent_hash: bytes, token_ids: list[int]) -> Iterator[tuple[int, list[int]]]:
        blocks = self._blocks.get((parent_hash, token_ids[0])) if token_ids else None
        return islice(reversed(blocks.items()), _MAX_COMPARED) if blocks else iter(())


def _common_length(a: list[int], b: list[int]) -> int:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
