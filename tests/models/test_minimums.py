"""A converted Q4_1 or Q4_K model has the weights of its file, to float16, and keeps them in 4 bits when it runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import openvino
import pytest

from tests.tiny_models import write_tiny_gguf
from tidegate.executor.openvino_model import compile_paged_model
from tidegate.models import convert
from tidegate.models.gguf_file import read_gguf
from tidegate.models.load import resolve_model
from tidegate.models.minimums import restore_minimums

Matrix = npt.NDArray[np.float32]

_SHAPES: dict[str, dict[str, Any]] = {
    "Q4_1": {"weight_type": "Q4_1"},
    "Q4_K": {"weight_type": "Q4_K", "head_size": 64, "ffn_size": 256},
}


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("weight_type", ["Q4_1", "Q4_K"])
def test_weights_are_those_of_the_file(tmp_path: Path, family: str, weight_type: str) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", family, **_SHAPES[weight_type])  # type: ignore[arg-type]
    assert_true_to_the_file(path)


def test_tied_embedding_is_that_of_the_file(tmp_path: Path) -> None:
    assert_true_to_the_file(write_tiny_gguf(tmp_path / "tiny.gguf", tied_embeddings=True, weight_type="Q4_1"))


@pytest.mark.parametrize(("scale", "minimum"), [(0.0, 0.25), (0.0, 0.0), (6e-8, -0.5), (0.01, 3.0), (0.01, -0.3)])
def test_groups_far_from_zero_and_of_one_value(tmp_path: Path, scale: float, minimum: float) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", weight_type="Q4_1")
    tensor = next(tensor for tensor in read_gguf(path).tensors if tensor.name == "blk.0.attn_q.weight")
    with open(path, "r+b") as file:
        for group in (0, 5):
            file.seek(tensor.offset + group * 20)
            file.write(np.array([scale, minimum], np.float16).tobytes())
    assert_true_to_the_file(path)


def test_file_without_minimums_is_left_as_it_was_read(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", weight_type="Q4_0")
    model = openvino.Core().read_model(resolve_model(str(path), progress=False).ir_path)
    assert restore_minimums(read_gguf(path), model) == 0


def test_matrix_that_is_not_in_the_file_ends_the_conversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", weight_type="Q4_1")
    other = write_tiny_gguf(tmp_path / "other.gguf", weight_type="Q4_1", seed=1)
    model = openvino.Core().read_model(resolve_model(str(path), progress=False).ir_path)
    with pytest.raises(ValueError, match="not in the file"):
        restore_minimums(read_gguf(other), model)


def test_file_converted_by_an_older_version_is_converted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", weight_type="Q4_1")
    with monkeypatch.context() as patch:
        patch.setattr(convert, "_LAYOUT_VERSION", convert._LAYOUT_VERSION - 1)
        old = resolve_model(str(path), progress=False)
    new = resolve_model(str(path), progress=False)
    assert new.ir_path != old.ir_path and new.ir_path.is_file()
    assert new.weight_digest == old.weight_digest


def test_products_read_the_weights_in_4_bits(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", weight_type="Q4_1")
    compiled = compile_paged_model(resolve_model(str(path), progress=False).ir_path, "u8", 2).compiled
    weight_types = Counter(
        op.input(1).get_element_type().get_type_name()
        for op in compiled.get_runtime_model().get_ops()
        if op.get_rt_info()["layerType"] == "FullyConnected"
    )
    assert weight_types == {"u4": 2 * 7 + 1}


def assert_true_to_the_file(path: Path) -> None:
    """Every 4-bit matrix of the file is in the IR, but for float16 rounding of scales and minimums."""
    head_size = int(read_gguf(path).metadata.get("llama.rope.dimension_count", 0))
    source = resolve_model(str(path), progress=False)
    found = list(_ir_matrices(source.ir_path))
    for tensor in gguf.GGUFReader(path).tensors:
        if len(tensor.shape) != 2:
            continue
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if head_size and tensor.name.split(".")[-2] in ("attn_q", "attn_k"):
            expected = _halves_apart(expected, head_size)
        # Scale and zero point are rounded, each by 2**-11; their product may exceed the group's largest weight.
        size = np.abs(expected).reshape(expected.shape[0], -1, 32).max(axis=-1).repeat(32, axis=-1)
        errors = [
            float((np.abs(matrix - expected) - size * 2.0**-9).max())
            for matrix in found
            if matrix.shape == expected.shape
        ]
        assert min(errors) <= 1e-7, tensor.name


def _ir_matrices(ir_path: Path) -> Iterator[Matrix]:
    """scale * (q - zero_point) of every 4-bit matrix, in float32, [rows, columns]."""
    for multiply in [op for op in openvino.Core().read_model(ir_path).get_ops() if op.get_type_name() == "Multiply"]:
        subtract = multiply.input_value(0).get_node()
        if subtract.get_type_name() != "Subtract" or (weights := _constant(subtract.input_value(0))) is None:
            continue
        assert weights.get_element_type() == openvino.Type.u4
        pairs = weights.data.reshape(-1)
        q = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(weights.shape).astype(np.float32)
        zero_points, scales = (_constant(op.input_value(1)).data.astype(np.float32) for op in (subtract, multiply))
        yield (scales * (q - zero_points)).reshape(q.shape[0], -1)


def _constant(output: Any) -> Any:
    node = output.get_node()
    node = node.input_value(0).get_node() if node.get_type_name() == "Convert" else node
    return node if node.get_type_name() == "Constant" else None


def _halves_apart(rows: Matrix, head_size: int) -> Matrix:
    """llama's queries and keys: the file has rotated pairs side by side, the reader puts them half a head apart."""
    return rows.reshape(-1, head_size // 2, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)
