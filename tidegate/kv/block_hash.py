"""Names for the content of full blocks: a chain of hashes over (parent, token ids).

Two blocks have one name exactly when they and everything before them hold the same tokens under the same root. The
root is made from what else decides the content of a block (weights, KV dtype, adapter) and from the namespace that
the server assigned, so that one tenant's blocks can never answer for another's.
BLAKE2b with 16 bytes: finding two prefixes with one name is out of reach, so hits need no second check.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b

DIGEST_SIZE = 16


def root_hash(weight_digest: str, kv_cache_dtype: str, namespace: str, adapter: str = "") -> bytes:
    """The parent of a sequence's first block."""
    text = "\x1f".join((weight_digest, kv_cache_dtype, adapter, namespace))
    return blake2b(text.encode(), digest_size=DIGEST_SIZE).digest()


def extend_block_hashes(hashes: list[bytes], root: bytes, token_ids: list[int], block_size: int) -> None:
    """Append the hashes of the full blocks of `token_ids` that `hashes` does not have yet, in place."""
    parent = hashes[-1] if hashes else root
    for start in range(len(hashes) * block_size, len(token_ids) - block_size + 1, block_size):
        parent = block_hash(parent, token_ids[start : start + block_size])
        hashes.append(parent)


def block_hash(parent: bytes, token_ids: list[int]) -> bytes:
    """The name of these tokens (a block's, or fewer) after the prefix named `parent`."""
    return blake2b(array("i", token_ids).tobytes(), digest_size=DIGEST_SIZE, key=parent).digest()
