"""The parts of the OpenVINO executor that need no model: the memory of the blocks, and which precisions go together."""

from __future__ import annotations

import numpy as np
import pytest
from openvino import Type

from tidegate.executor.base import ExecutorError
from tidegate.executor.openvino_blocks import BlockMemory, CacheTensor
from tidegate.executor.openvino_model import choose_precision

# Two layers whose keys and values differ in size, as they do where the scales of a u8 cache lie in the block.
CACHE_TENSORS = (
    CacheTensor("key_cache.0", (2, 5, 4), Type.u8),
    CacheTensor("value_cache.0", (2, 4, 6), Type.u8),
    CacheTensor("key_cache.1", (2, 5, 4), Type.u8),
    CacheTensor("value_cache.1", (2, 4, 6), Type.u8),
)
BYTES_PER_BLOCK = 2 * (40 + 48)


def content(seed: int) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, BYTES_PER_BLOCK, dtype=np.uint8).tobytes()


@pytest.fixture
def memory() -> BlockMemory:
    memory = BlockMemory(CACHE_TENSORS, 10 * BYTES_PER_BLOCK + 5)
    memory.write(range(10), [content(i) for i in range(10)])
    return memory


@pytest.mark.parametrize("spare", [0, 1, BYTES_PER_BLOCK - 1])
def test_memory_holds_the_most_whole_blocks_that_fit(spare: int) -> None:
    memory = BlockMemory(CACHE_TENSORS, 7 * BYTES_PER_BLOCK + spare)
    assert (memory.num_blocks, memory.bytes_per_block) == (7, BYTES_PER_BLOCK)
    assert sum(tensor.byte_size for tensor in memory.tensors.values()) == 7 * BYTES_PER_BLOCK


def test_tensors_have_the_shapes_of_the_model_and_are_the_memory_itself(memory: BlockMemory) -> None:
    for cache_tensor in CACHE_TENSORS:
        tensor = memory.tensors[cache_tensor.name]
        assert list(tensor.shape) == [10, *cache_tensor.block_shape]
        before = memory.read(range(10))
        tensor.data[3] += 1
        assert [i for i, (old, new) in enumerate(zip(before, memory.read(range(10)), strict=True)) if old != new] == [3]


def test_no_byte_is_shared_by_two_tensors(memory: BlockMemory) -> None:
    for tensor in memory.tensors.values():
        tensor.data[:] = 0
    for value, tensor in enumerate(memory.tensors.values(), start=1):
        assert not tensor.data.any()
        tensor.data[:] = value


def test_what_is_written_is_read_back_in_any_order(memory: BlockMemory) -> None:
    assert memory.read([7, 0, 9, 7]) == [content(7), content(0), content(9), content(7)]


def test_copies_are_done_in_order_and_touch_only_their_destinations(memory: BlockMemory) -> None:
    memory.copy([(0, 1), (1, 2), (5, 0)])
    expected = [content(5), content(0), content(0), *(content(i) for i in range(3, 10))]
    assert memory.read(range(10)) == expected


@pytest.mark.parametrize("block_id", [-1, 10])
def test_blocks_that_do_not_exist_are_refused_before_anything_changes(memory: BlockMemory, block_id: int) -> None:
    for verb in (
        lambda: memory.copy([(0, 1), (2, block_id)]),
        lambda: memory.copy([(0, 1), (block_id, 2)]),
        lambda: memory.read([0, block_id]),
        lambda: memory.write([1, block_id], [content(0), content(0)]),
    ):
        with pytest.raises(ExecutorError, match="does not exist"):
            verb()
    assert memory.read(range(10)) == [content(i) for i in range(10)]


def test_content_that_does_not_fit_is_refused_before_anything_changes(memory: BlockMemory) -> None:
    with pytest.raises(ValueError, match="a block here has"):
        memory.write([0, 1], [content(5), content(5) + b"x"])
    with pytest.raises(ValueError, match="cannot take"):
        memory.write([0, 1], [content(5)])
    assert memory.read([0, 1]) == [content(0), content(1)]


def test_too_little_memory_says_what_a_block_takes() -> None:
    with pytest.raises(ExecutorError, match=f"{BYTES_PER_BLOCK:,} bytes"):
        BlockMemory(CACHE_TENSORS, BYTES_PER_BLOCK - 1)


def test_more_memory_than_the_machine_has_is_refused_at_once() -> None:
    with pytest.raises(ExecutorError, match="MiB"):
        BlockMemory(CACHE_TENSORS, 2**60)


@pytest.mark.parametrize(
    ("asked", "has_bf16", "served"),
    [
        ("u8", True, ("u8", "bf16")),
        ("bf16", True, ("bf16", "bf16")),
        ("f32", True, ("f32", "f32")),
        ("u8", False, ("u8", "f32")),
        ("bf16", False, ("f32", "f32")),
        ("f32", False, ("f32", "f32")),
    ],
)
def test_the_precision_served_is_one_that_the_machine_has(asked: str, has_bf16: bool, served: tuple[str, str]) -> None:
    precision = choose_precision(asked, has_bf16)  # type: ignore[arg-type]
    assert (precision.kv_cache_dtype, precision.compute_dtype) == served
    assert (precision.quantization_group == 0) == (asked == "f32")
