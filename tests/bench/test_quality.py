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


def test_a_model_that_knows_nothing_is_about_as_perplexed_as_its_vocabulary_is_large(tmp_path):
    path = write_tiny_gguf(tmp_path / "tiny.gguf", weight_type="F16")
    found = quality.measure("tiny", str(path), resolve_model(str(path), progress=False), "f32")
    vocab_size = len(read_gguf(path).metadata["tokenizer.ggml.tokens"])
    assert math.log(found.perplexity) == pytest.approx(math.log(vocab_size), abs=1.0)
    assert found.num_tokens > 2000
    assert found.kv_bytes_per_token > 0
