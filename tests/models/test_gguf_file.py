"""What a GGUF file says of itself, and how a file that cannot be served is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGUFReader
from hypothesis import given
from hypothesis import strategies as st

from tests.tiny_models import CHAT_TEMPLATE, EOS_ID, Family, tiny_vocabulary, write_tiny_gguf
from tidegate.models.errors import ModelError
from tidegate.models.gguf_file import check_convertible, read_architecture, read_gguf


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_header_is_read_as_the_reference_reader_reads_it(tmp_path: Path, family: Family) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", family)
    file, reference = read_gguf(path), GGUFReader(path)
    assert file.metadata == {
        key: field.contents() for key, field in reference.fields.items() if not key.startswith("GGUF.")
    }
    assert [(t.name, t.shape, t.offset, t.num_bytes) for t in file.tensors] == [
        (t.name, tuple(t.shape.tolist())[::-1], t.data_offset, t.n_bytes) for t in reference.tensors
    ]


def test_architecture_comes_from_the_metadata(tmp_path: Path) -> None:
    path = write_tiny_gguf(
        tmp_path / "m.gguf", "qwen3", num_layers=3, num_heads=4, num_kv_heads=1, head_size=64, hidden_size=128
    )
    shape = read_architecture(read_gguf(path))
    assert (shape.family, shape.num_layers, shape.num_heads, shape.num_kv_heads) == ("qwen3", 3, 4, 1)
    assert (shape.head_size, shape.hidden_size, shape.context_length) == (64, 128, 512)
    assert shape.vocab_size == len(tiny_vocabulary()[0])


def test_vocabulary_and_chat_template_are_whole(tiny_gguf: Path) -> None:
    metadata = read_gguf(tiny_gguf).metadata
    assert metadata["tokenizer.ggml.tokens"] == tiny_vocabulary()[0]
    assert metadata["tokenizer.ggml.eos_token_id"] == EOS_ID
    assert metadata["tokenizer.chat_template"] == CHAT_TEMPLATE


def test_same_arguments_write_the_same_bytes(tmp_path: Path) -> None:
    first, second = write_tiny_gguf(tmp_path / "a.gguf"), write_tiny_gguf(tmp_path / "b.gguf")
    assert first.read_bytes() == second.read_bytes()
    assert first.read_bytes() != write_tiny_gguf(tmp_path / "c.gguf", seed=1).read_bytes()


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nothing\.gguf: No such file"):
        read_gguf(tmp_path / "nothing.gguf")


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04 a zip file", b"\x00" * 100])
def test_other_files_are_no_gguf(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match="is not a GGUF file"):
        read_gguf(path)


@pytest.mark.parametrize("kept", [5, 24, 200, 4000, -200_000, -33])
def test_truncated_file_is_refused_wherever_it_ends(tiny_gguf: Path, kept: int) -> None:
    content = tiny_gguf.read_bytes()
    tiny_gguf.write_bytes(content[:kept])
    with pytest.raises(ModelError, match="is truncated") as caught:
        read_gguf(tiny_gguf)
    assert "\n" not in str(caught.value)


def test_whole_file_is_not_taken_for_truncated(tiny_gguf: Path) -> None:
    end = max(t.offset + t.num_bytes for t in read_gguf(tiny_gguf).tensors)
    tiny_gguf.write_bytes(tiny_gguf.read_bytes()[:end])
    read_gguf(tiny_gguf)


@given(position=st.integers(4, 6000), value=st.integers(0, 255))
def test_damaged_header_is_refused_or_read_but_never_crashes(
    tmp_path_factory: pytest.TempPathFactory, position: int, value: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    content = bytearray(_TINY)
    content[position] = value
    path.write_bytes(content)
    try:
        file = read_gguf(path)
        check_convertible(file)
        read_architecture(file)
    except ModelError as error:
        assert str(path) in str(error)


def test_unsupported_architecture_is_named_with_what_is_supported(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", architecture="gemma3")
    with pytest.raises(ModelError, match=r"'gemma3' model.*supported: llama, qwen2, qwen3"):
        read_architecture(read_gguf(path))


def test_unsupported_quantization_is_named_with_what_is_supported(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", weight_type="BF16")
    with pytest.raises(ModelError, match=r"'token_embd.weight' as BF16.*Q4_1"):
        check_convertible(read_gguf(path))


_TINY = b""


@pytest.fixture(autouse=True, scope="module")
def _tiny_bytes(tmp_path_factory: pytest.TempPathFactory) -> None:
    global _TINY
    _TINY = write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf").read_bytes()
