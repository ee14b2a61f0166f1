"""BlockMemory: the bytes of the KV blocks of an OpenVINO model, as tensors for inference and as rows for copying.

Owns one anonymous memory mapping, cut into one tensor a layer for keys and one for values. All of it is touched at
start: a machine with too little memory says so then and not under load, and the process does not grow later.
Never does: decide which block is whose.

    mapping:  | key_cache.0 | key_cache.1 | ... | value_cache.0 | value_cache.1 | ... |
    a block b is row b of each tensor; tensors whose rows have equal size form one array [tensors, blocks, bytes].

Invariant: num_blocks * bytes_per_block is the most whole blocks that kv_memory holds.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt
from openvino import Shape, Tensor, Type

from tidegate.executor.base import ExecutorError

Bytes3d = np.ndarray[tuple[int, int, int], np.dtype[np.uint8]]


@dataclass(frozen=True)
class CacheTensor:
    """One cache input of the compiled model: the shape of one block in it (scales included) and its element type."""

    name: str
    block_shape: tuple[int, ...]
    element_type: Type

    @property
    def bytes_per_block(self) -> int:
        return prod(self.block_shape) * int(self.element_type.size)


class BlockMemory:
    def __init__(self, cache_tensors: Sequence[CacheTensor], kv_memory: int) -> None:
        """`kv_memory` in bytes. Raises ExecutorError when it holds no block or the machine has less."""
        self.bytes_per_block = sum(tensor.bytes_per_block for tensor in cache_tensors)
        self.num_blocks = kv_memory // self.bytes_per_block
        if self.num_blocks == 0:
            raise ExecutorError(
                f"KV memory of {kv_memory:,} bytes holds no block: one block of this model takes "
                f"{self.bytes_per_block:,} bytes"
            )
        memory = _reserve(self.num_blocks * self.bytes_per_block)
        groups: dict[int, list[CacheTensor]] = {}
        for tensor in cache_tensors:
            groups.setdefault(tensor.bytes_per_block, []).append(tensor)
        self.tensors: dict[str, Tensor] = {}
        self._groups: list[Bytes3d] = []
        start = 0
        for row_bytes, members in groups.items():
            shape = (len(members), self.num_blocks, row_bytes)
            group = memory[start : start + prod(shape)].reshape(shape)
            start += prod(shape)
            self._groups.append(group)
            for index, member in enumerate(members):
                self.tensors[member.name] = Tensor(
                    group[index].reshape(-1), Shape([self.num_blocks, *member.block_shape]), member.element_type
                )

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, destination), in order. Raises ExecutorError before any copy is done."""
        self._check(block_id for pair in pairs for block_id in pair)
        for source, destination in pairs:
            for group in self._groups:
                group[:, destination] = group[:, source]

    def read(self, block_ids: Sequence[int]) -> list[bytes]:
        """The content of each block: its rows of every tensor, in the order of the mapping."""
        self._check(block_ids)
        return [b"".join(group[:, block_id].tobytes() for group in self._groups) for block_id in block_ids]

    def write(self, block_ids: Sequence[int], data: Sequence[bytes]) -> None:
        """The reverse of read. Raises ValueError when the data does not fit, before any block is written."""
        self._check(block_ids)
        if len(data) != len(block_ids):
            raise ValueError(f"{len(block_ids)} blocks cannot take the content of {len(data)}")
        for content in data:
            if len(content) != self.bytes_per_block:
                raise ValueError(f"a block here has {self.bytes_per_block} bytes, not {len(content)}")
        for block_id, content in zip(block_ids, data, strict=True):
            source = np.frombuffer(content, dtype=np.uint8)
            start = 0
            for group in self._groups:
                num_tensors, _, row_bytes = group.shape
                end = start + num_tensors * row_bytes
                group[:, block_id] = source[start:end].reshape(num_tensors, row_bytes)
                start = end

    def _check(self, block_ids: Sequence[int] | Iterator[int]) -> None:
        for block_id in block_ids:
            if not 0 <= block_id < self.num_blocks:
                raise ExecutorError(f"block {block_id} does not exist: blocks are 0 to {self.num_blocks - 1}")


def _reserve(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Anonymous zeroed memory, every page of it present. Raises ExecutorError."""
    available = _available_bytes()
    if available is not None and num_bytes > available:
        raise ExecutorError(
            f"KV memory of {num_bytes / 2**20:,.0f} MiB is more than the {available / 2**20:,.0f} MiB that are free"
        )
    try:
        mapping = mmap.mmap(-1, num_bytes)
    except OSError as error:
        raise ExecutorError(f"cannot reserve {num_bytes:,} bytes for the KV cache: {error.strerror}") from None
    memory = np.frombuffer(mapping, dtype=np.uint8)
    memory[:: mmap.PAGESIZE] = 0
    return memory


def _available_bytes() -> int | None:
    """Memory that can be had without swapping, or None where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None
