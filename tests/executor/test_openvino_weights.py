"""Weights for int8 products: 8 bits, integer zero points, and the values that they had."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import openvino as ov
import openvino.opset13 as ops
import pytest

from tests.tiny_models import write_tiny_gguf
from tidegate.executor import openvino_model
from tidegate.executor.openvino_model import Precision, compile_paged_model
from tidegate.executor.openvino_weights import widen_weights
from tidegate.models.load import resolve_model

ZERO_POINTS = np.array([7.4, 0.6, -3.0, 40.0, 1.0, 0.0], np.float16).reshape(1, 6, 1)
SCALES = np.array([0.01, 2.0, 0.1, 0.1, -0.25, 0.0], np.float16).reshape(1, 6, 1)


def _model(weights: ov.Node, zero_points: ov.Node) -> ov.Model:
    matrix = ops.multiply(ops.subtract(ops.convert(weights, "f16"), zero_points), ops.constant(SCALES))
    return ov.Model([ops.convert(matrix, "f32")], [], "matrix")


def _types(model: ov.Model) -> set[str]:
    constants = [op for op in model.get_ops() if op.get_type_name() == "Constant"]
    return {op.get_element_type().get_type_name() for op in constants}


def test_widened_weights_have_the_values_they_had() -> None:
    q = np.random.default_rng(0).integers(0, 16, (1, 6, 32))
    q[0, 4] = 0  # One value only, as the conversion writes a group without a scale.
    model = _model(ops.constant(q, ov.Type.u4), ops.constant(ZERO_POINTS))
    assert widen_weights(model) == 1
    assert _types(model) == {"u8", "f16"}
    got = ov.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})([])[0]
    expected = SCALES.astype(np.float32) * (q - ZERO_POINTS.astype(np.float32))
    spread = np.maximum(expected.max(-1, keepdims=True), 0) - np.minimum(expected.min(-1, keepdims=True), 0)
    assert np.all(np.abs(got - expected) <= spread / 255 + 1e-6)


def test_integer_zero_points_are_left_alone() -> None:
    zero_points = ops.convert(ops.constant(np.full((1, 6, 1), 8), ov.Type.u4), "f16")
    model = _model(ops.constant(np.zeros((1, 6, 32), np.int64), ov.Type.u4), zero_points)
    assert widen_weights(model) == 0
    assert "u4" in _types(model)


def test_cpu_without_bf16_multiplies_integers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(openvino_model, "choose_precision", lambda *_: Precision("u8", "f32", 32))
    path = write_tiny_gguf(tmp_path / "tiny.gguf", weight_type="Q4_1")
    compiled = compile_paged_model(resolve_model(str(path), progress=False).ir_path, "u8", 2).compiled
    products = [
        op for op in compiled.get_runtime_model().get_ops() if op.get_rt_info()["layerType"] == "FullyConnected"
    ]
    types = {tuple(op.input(i).get_element_type().get_type_name() for i in (1, 4)) for op in products}
    assert types == {("u8", "u8")}
