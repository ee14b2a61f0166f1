"""Files of other precisions are the same model, and the perplexity is that of the text."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from tests.tiny_models import write_tiny_gguf
from tidegate.bench import quality
from tidegate.bench.weight_files import made_file
from tidegate.models.gguf_file import read_gguf
from tidegate.models.load import resolve_model


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache-home"))


@pytest.mark.parametrize(("weight_type", "most"), [("F16", 1e-3), ("Q8_0", 1e-2)])
def test_a_made_file_holds_the_same_weights_and_metadata(tmp_path, weight_type, most):
    import gguf

    source = write_tiny_gguf(tmp_path / "tiny.gguf", weight_type="Q4_1")
    made = made_file(source, "tiny", weight_type)
    old, new = read_gguf(source), read_gguf(made)
    assert old.metadata == new.metadata
    assert new.weight_format == weight_type
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(made).tensors}
    for tensor in gguf.GGUFReader(source).tensors:
        before = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        after = gguf.quants.dequantize(tensors[tensor.name].data, tensors[tensor.name].tensor_type)
        assert np.abs(after - before).max() <= most * np.abs(before).max()


def test_a_file_is_made_once(tmp_path):
    source = write_tiny_gguf(tmp_path / "tiny.gguf", weight_type="Q4_1")
    first = made_file(source, "tiny", "F16").stat().st_ino
    assert made_file(source, "tiny", "F16").stat().st_ino == first


def test_perplexity_does_not_depend_on_the_chunks_it_is_computed_in(tmp_path, monkeypatch):
    path = write_tiny_gguf(tmp_path / "tiny.gguf", weight_type="F16")
    source = resolve_model(str(path), progress=False)
    found = quality.measure("tiny", str(path), source, "f32")
    monkeypatch.setattr(quality, "CHUNK_TOKENS", 512)
    assert quality.measure("tiny", str(path), source, "f32").perplexity == pytest.approx(found.perplexity, rel=1e-3)
    assert math.isfinite(found.perplexity) and found.perplexity > 10
    assert found.num_tokens > 2000
    shape = source.architecture
    assert found.kv_bytes_per_token == 2 * shape.num_layers * shape.num_kv_heads * shape.head_size * 4
