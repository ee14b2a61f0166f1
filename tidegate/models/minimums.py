"""Giving a converted IR the group minimums of its GGUF, which OpenVINO GenAI's reader rounds.

Q4_1 and Q4_K store a weight as scale * q + minimum, q of 4 bits. The reader writes it as scale * (q - zero_point) and
rounds the zero point to an integer, which moves all weights of a group one way by up to half a step. Here the zero
point becomes -minimum / scale, as float16.

    Constant u4 [rows, groups, 32] -> Convert -> Subtract <- zero points [rows, groups, 1], replaced
                                                    └-> Multiply <- scales f16 [rows, groups, 1] -> Reshape -> ...

Runs in the conversion's child process. Invariant: an IR has all of its minimums or is not made. Its matrices are found
in the file by their content, in the file's order of rows or in the reader's.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from tidegate.models.gguf_file import GgufFile, GgufTensor, read_architecture

_GROUP = 32
_SUPER_BLOCK_GROUPS = 8
_MAX_ZERO_POINT = 2.0**15
"""Where it is larger (the scale may be 0), float16 rounds the minimum by more than the group's weights differ."""

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.float16]


@dataclass(frozen=True, slots=True)
class Groups:
    """A matrix in groups of 32: `packed` [rows, groups, 16] has two weights a byte, the low half first.

    weight = scale * q + minimum; scales and minimums are [rows, groups, 1].
    """

    packed: Bytes
    scales: Halves
    minimums: Floats

    def reordered(self, row_order: npt.NDArray[np.int64]) -> Groups:
        return Groups(self.packed[row_order], self.scales[row_order], self.minimums[row_order])


def restore_minimums(file: GgufFile, model: Any) -> int:
    """Make the zero points of `model`, an openvino.Model that the reader made of `file`, exact; of how many matrices.

    Raises ValueError when a matrix of rounded zero points is not found in the file.
    """
    head_size = read_architecture(file).head_size
    subtractions = _four_bit_subtractions(model)
    num_restored = 0
    with open(file.path, "rb") as data:
        for tensor in file.tensors:
            if tensor.type_name not in ("Q4_1", "Q4_K") or len(tensor.shape) != 2:
                continue
            for groups in _row_orders(tensor, read_groups(data, tensor), head_size):
                for subtract in subtractions.pop(_digest(groups.packed.tobytes()), []):
                    _restore(subtract, groups)
                    num_restored += 1
    for remaining in subtractions.values():
        if any(np.any(_zero_points(subtract) != 8) for subtract in remaining):  # 8 is that of Q4_0, and exact.
            raise ValueError("a 4-bit matrix of the converted model is not in the file as it was read")
    return num_restored


def read_groups(data: BinaryIO, tensor: GgufTensor) -> Groups:
    """The content of a Q4_1 or Q4_K tensor."""
    rows, columns = tensor.shape
    data.seek(tensor.offset)
    raw = np.frombuffer(data.read(tensor.num_bytes), np.uint8)
    if tensor.type_name == "Q4_1":  # Of each group: scale, minimum, 16 bytes.
        blocks = raw.reshape(rows, columns // _GROUP, 20)
        scales = blocks[..., 0:2].copy().view(np.float16)
        minimums = blocks[..., 2:4].copy().view(np.float16).astype(np.float32)
        return Groups(_pack(blocks[..., 4:] & 15, blocks[..., 4:] >> 4), scales, minimums)
    # Of each 8 groups: scale of scales, scale of minimums, 12 bytes of both in 6 bits, 4 times 32 bytes of two groups.
    blocks = raw.reshape(rows, columns // (_GROUP * _SUPER_BLOCK_GROUPS), 144)
    units = blocks[..., 0:4].copy().view(np.float16).astype(np.float32)
    num_scales, num_minimums = _six_bits(blocks[..., 4:16])
    pairs = blocks[..., 16:].reshape(rows, -1, 4, 1, _GROUP)
    quarters = np.concatenate([pairs & 15, pairs >> 4], axis=3).reshape(rows, columns // _GROUP, 2, _GROUP // 2)
    return Groups(
        _pack(quarters[..., 0, :], quarters[..., 1, :]),
        (units[..., 0:1] * num_scales).astype(np.float16).reshape(rows, -1, 1),
        (-units[..., 1:2] * num_minimums).reshape(rows, -1, 1),
    )


def _six_bits(packed: Bytes) -> tuple[Bytes, Bytes]:
    """8 scales and 8 minimums, in 12 bytes: the first 4 of each in 6 bits, the rest in 4 bits and 2 left over there."""
    low, middle, high = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales: Bytes = np.concatenate([low & 63, (high & 15) | (low >> 6) << 4], axis=-1)
    minimums: Bytes = np.concatenate([middle & 63, high >> 4 | (middle >> 6) << 4], axis=-1)
    return scales, minimums


def _pack(first: npt.NDArray[np.integer], second: npt.NDArray[np.integer]) -> Bytes:
    """Two weights a byte, from the 16 first and the 16 last of each group."""
    values = np.concatenate([first, second], axis=-1)
    packed: Bytes = (values[..., 0::2] | values[..., 1::2] << 4).astype(np.uint8)
    return packed


def _row_orders(tensor: GgufTensor, groups: Groups, head_size: int) -> Iterator[Groups]:
    """As the file has it, and, for queries and keys, with the halves of each rotated pair apart, as the reader may."""
    yield groups
    if ".attn_q." in tensor.name or ".attn_k." in tensor.name:
        rows = np.arange(tensor.shape[0]).reshape(-1, head_size // 2, 2)
        yield groups.reordered(rows.transpose(0, 2, 1).reshape(-1))


def _restore(subtract: Any, groups: Groups) -> None:
    """Give one matrix its exact zero points. A group of one value gets this as its scale, with q = 0."""
    from openvino import opset13

    (multiply,) = [target.get_node() for target in subtract.output(0).get_target_inputs()]
    scales = groups.scales.astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        zero_points = -groups.minimums / scales
    flat = ~(np.abs(zero_points) <= _MAX_ZERO_POINT)
    if flat.any():
        packed = np.where(flat, np.uint8(0), groups.packed)
        _replace(subtract.input(0).get_source_output().get_node().input(0), _u4_constant(packed))
        _replace(multiply.input(1), opset13.constant(np.where(flat, -groups.minimums, scales).astype(np.float16)))
        zero_points = np.where(flat, np.float32(1), zero_points)
    _replace(subtract.input(1), opset13.constant(zero_points.astype(np.float16)))


def _replace(target: Any, constant: Any) -> None:
    target.replace_source_output(constant.output(0))


def _u4_constant(packed: Bytes) -> Any:
    import openvino

    rows, num_groups, _ = packed.shape
    tensor = openvino.Tensor(openvino.Type.u4, openvino.Shape([rows, num_groups, _GROUP]))
    tensor.data[:] = packed.reshape(tensor.data.shape)  # Of its own: a constant does not keep an array alive.
    return openvino.op.Constant(tensor)


def _four_bit_subtractions(model: Any) -> dict[bytes, list[Any]]:
    """The Subtract nodes of 4-bit matrices, by a digest of the matrix. The embedding may be there twice."""
    found: dict[bytes, list[Any]] = {}
    for op in model.get_ops():
        if op.get_type_name() != "Subtract" or op.input_value(0).get_node().get_type_name() != "Convert":
            continue
        weights = op.input_value(0).get_node().input_value(0).get_node()
        if weights.get_type_name() == "Constant" and weights.get_element_type().get_type_name() == "u4":
            found.setdefault(_digest(weights.data.tobytes()), []).append(op)
    return found


def _zero_points(subtract: Any) -> npt.NDArray[np.float32]:
    node = subtract.input_value(1).get_node()
    while node.get_type_name() != "Constant":
        node = node.input_value(0).get_node()
    if node.get_element_type().get_type_name() == "u4":
        pairs = np.asarray(node.data, np.uint8).reshape(-1)
        return np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(-1)[: math.prod(node.shape)]
    return np.asarray(node.data, np.float32)


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()
