"""4-bit weights with zero points that are no integers, as 8-bit weights with zero points that are.

Owns: what int8 products need. The CPU plugin quantizes activations only where weights and zero points are unsigned
integers; with others it computes in float32, at 0.6 of the speed. bf16 products take any zero point, in 4 bits.
Each group of weights is laid anew over 0..255, which moves a weight by at most 1/30 of its 4-bit step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import openvino as ov
import openvino.opset13 as ops


@dataclass(frozen=True)
class _Matrix:
    """scale * (q - zero point), as nodes of the graph: Convert of a u4 constant, Subtract, Multiply."""

    convert: ov.Node
    subtract: ov.Node
    multiply: ov.Node


def widen_weights(model: ov.Model) -> int:
    """Replace the matrices of float zero points in `model`; how many."""
    matrices = list(_matrices(model))
    for matrix in matrices:
        _widen(matrix)
    return len(matrices)


def _matrices(model: ov.Model) -> Iterator[_Matrix]:
    for multiply in model.get_ops():
        if multiply.get_type_name() != "Multiply" or not _is_constant(multiply.input_value(1), ov.Type.f16):
            continue
        subtract = multiply.input_value(0).get_node()
        if subtract.get_type_name() != "Subtract" or not _is_constant(subtract.input_value(1), ov.Type.f16):
            continue
        convert = subtract.input_value(0).get_node()
        if convert.get_type_name() == "Convert" and _is_constant(convert.input_value(0), ov.Type.u4):
            yield _Matrix(convert, subtract, multiply)


def _widen(matrix: _Matrix) -> None:
    constant = matrix.convert.input_value(0).get_node()
    pairs = constant.data.reshape(-1)
    q = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(constant.shape).astype(np.float32)
    weights = _values(matrix.multiply.input_value(1)) * (q - _values(matrix.subtract.input_value(1)))
    least = np.minimum(weights.min(axis=-1, keepdims=True), 0)
    steps = ((np.maximum(weights.max(axis=-1, keepdims=True), 0) - least) / 255).astype(np.float16).astype(np.float32)
    divisors = np.where(steps > 0, steps, 1)
    wide_zero_points = np.clip(np.round(-least / divisors), 0, 255)
    wide = np.clip(np.round(weights / divisors + wide_zero_points), 0, 255)
    _replace(matrix.convert.input(0), ops.constant(wide.astype(np.uint8)))
    _replace(matrix.subtract.input(1), ops.convert(ops.constant(wide_zero_points.astype(np.uint8)), "f16"))
    _replace(matrix.multiply.input(1), ops.constant(steps.astype(np.float16)))


def _is_constant(output: ov.Output, element_type: ov.Type) -> bool:
    return output.get_node().get_type_name() == "Constant" and bool(output.get_element_type() == element_type)


def _values(constant: ov.Output) -> npt.NDArray[np.float32]:
    return np.asarray(constant.get_node().data, np.float32)


def _replace(target: ov.Input, node: ov.Node) -> None:
    target.replace_source_output(node.output(0))
