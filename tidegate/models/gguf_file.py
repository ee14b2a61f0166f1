"""Reading the header of a GGUF file: metadata and the list of tensors, without touching the weights.

Owns: finding out that a file is no GGUF, is cut short, or holds what OpenVINO GenAI's reader cannot take.
Every length in the file is checked against the file's size before it is believed. Layout (version 2 and 3,
little-endian): magic, version, counts; metadata as (key, type, value); tensors as (name, shape, type, offset); data.
"""

from __future__ import annotations

import mmap
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidegate.models.errors import ModelError
from tidegate.models.source import Architecture

FAMILIES = ("llama", "qwen2", "qwen3")
WEIGHT_TYPES = ("F16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
"""What OpenVINO GenAI's reader takes for matrices, found by trying."""

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_MAX_TENSOR_DIMS = 4


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """`shape` is rows first. `offset` is from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    path: Path
    metadata: dict[str, Any]
    tensors: tuple[GgufTensor, ...]

    @property
    def weight_format(self) -> str:
        """The type that holds most of the weights of matrices."""
        weights: Counter[str] = Counter()
        for tensor in self.tensors:
            if len(tensor.shape) > 1 and tensor.name.startswith("blk."):
                weights[tensor.type_name] += tensor.num_bytes
        return weights.most_common(1)[0][0] if weights else "unknown"


class _Truncated(Exception):
    pass


class _Cursor:
    """Bounded reads from the mapped file."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.offset = 0

    def take(self, num_bytes: int) -> int:
        """Start of the next num_bytes bytes."""
        start = self.offset
        if num_bytes > len(self.data) - start:
            raise _Truncated
        self.offset = start + num_bytes
        return start

    def scalar(self, layout: str) -> Any:
        return struct.unpack_from(layout, self.data, self.take(struct.calcsize(layout)))[0]

    def string(self) -> str:
        length = self.scalar("<Q")
        start = self.take(length)
        return self.data[start : start + length].decode("utf-8", "replace")

    def value(self, value_type: int) -> Any:
        if value_type == _STRING:
            return self.string()
        if value_type != _ARRAY:
            if value_type not in _SCALARS:
                raise ValueError(f"unknown metadata type {value_type}")
            return self.scalar(_SCALARS[value_type])
        item_type, count = self.scalar("<I"), self.scalar("<Q")
        if item_type == _STRING:
            if count * 8 > len(self.data):
                raise _Truncated
            return [self.string() for _ in range(count)]
        if item_type not in _SCALARS:
            raise ValueError(f"unknown metadata array type {item_type}")
        letter = _SCALARS[item_type][1]
        start = self.take(count * struct.calcsize(f"<{letter}"))
        return list(struct.unpack_from(f"<{count}{letter}", self.data, start))


def read_gguf(path: Path) -> GgufFile:
    """Raises ModelError when the file is missing, no GGUF, or shorter than its own header says."""
    try:
        with open(path, "rb") as file:
            if file.read(4) != b"GGUF":
                raise ModelError(f"{path} is not a GGUF file; pass a .gguf file of a llama or qwen model")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(path, _Cursor(data))
    except OSError as error:
        raise ModelError(f"cannot read model file {path}: {error.strerror or error}") from None
    except _Truncated:
        raise ModelError(f"{path} is truncated: the file ends inside its header; fetch or copy it again") from None
    except ValueError as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{path} is damaged ({error}); fetch or copy it again") from None


def _parse(path: Path, cursor: _Cursor) -> GgufFile:
    cursor.take(4)
    version = cursor.scalar("<I")
    if version not in (2, 3):
        raise ModelError(f"{path} has GGUF version {version}; versions 2 and 3 (little-endian) are supported")
    num_tensors, num_keys = cursor.scalar("<Q"), cursor.scalar("<Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("<I"))
    entries = [_tensor_entry(path, cursor) for _ in range(num_tensors)]
    alignment = int(metadata.get("general.alignment", 32))
    if alignment <= 0:
        raise ValueError("alignment is not positive")
    data_start = -(-cursor.offset // alignment) * alignment
    tensors = tuple(
        GgufTensor(name, shape, type_name, data_start + offset, num_bytes)
        for name, shape, type_name, offset, num_bytes in entries
    )
    end = max((tensor.offset + tensor.num_bytes for tensor in tensors), default=data_start)
    if end > len(cursor.data):
        raise ModelError(
            f"{path} is truncated: its weights need {end:,} bytes and the file has {len(cursor.data):,}; "
            "fetch or copy it again"
        )
    return GgufFile(path, metadata, tensors)


def _tensor_entry(path: Path, cursor: _Cursor) -> tuple[str, tuple[int, ...], str, int, int]:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    name = cursor.string()
    num_dims = cursor.scalar("<I")
    if num_dims > _MAX_TENSOR_DIMS:
        raise ValueError(f"tensor '{name}' has {num_dims} dimensions")
    shape = tuple(cursor.scalar("<Q") for _ in range(num_dims))[::-1]
    type_number, offset = cursor.scalar("<I"), cursor.scalar("<Q")
    try:
        tensor_type = GGMLQuantizationType(type_number)
        block_size, block_bytes = GGML_QUANT_SIZES[tensor_type]
    except (ValueError, KeyError):
        raise ModelError(
            f"{path} stores '{name}' in an unknown quantization (number {type_number}); "
            f"supported: {', '.join(WEIGHT_TYPES)}"
        ) from None
    num_values = 1
    for size in shape:
        num_values *= size
    return name, shape, tensor_type.name, offset, num_values // block_size * block_bytes


def check_convertible(file: GgufFile) -> None:
    """Raises ModelError naming what of the file OpenVINO GenAI's reader cannot take, or would take wrongly."""
    path, family = file.path, _family(file)
    scaling = file.metadata.get(f"{family}.rope.scaling.type", "none")
    if file.metadata.get(f"{family}.expert_count"):
        raise ModelError(f"{path} holds a mixture-of-experts model, which is not supported; pass a dense one")
    if scaling != "none":
        raise ModelError(f"{path} stretches its context by '{scaling}' scaling, which is not supported")
    for tensor in file.tensors:
        if len(tensor.shape) > 1 and tensor.type_name not in WEIGHT_TYPES:
            raise ModelError(
                f"{path} stores '{tensor.name}' as {tensor.type_name}, which is not supported; pass a file whose "
                f"matrices are {', '.join(WEIGHT_TYPES)} (Q4_K_M is a mix of these)"
            )


def rope_factors(file: GgufFile) -> list[float]:
    """What each rotary frequency is divided by (Llama 3.1 and later), from the tensor rope_freqs; empty: none is."""
    tensor = next((tensor for tensor in file.tensors if tensor.name == "rope_freqs.weight"), None)
    if tensor is None:
        return []
    if tensor.type_name != "F32" or len(tensor.shape) != 1:
        raise ModelError(f"{file.path} has a 'rope_freqs.weight' that is no F32 vector, which is not supported")
    with open(file.path, "rb") as data:
        data.seek(tensor.offset)
        return list(struct.unpack(f"<{tensor.shape[0]}f", data.read(tensor.num_bytes)))


def read_architecture(file: GgufFile) -> Architecture:
    """The shape of the model. Raises ModelError when the file lacks it, or is of a family that cannot be served."""
    path, metadata, family = file.path, file.metadata, _family(file)

    def number(key: str, default: int | None = None) -> int:
        value = metadata.get(f"{family}.{key}", default)
        if not isinstance(value, int) or value <= 0:
            raise ModelError(f"{path} lacks a usable '{family}.{key}' in its metadata; it cannot be served")
        return value

    num_heads = number("attention.head_count")
    hidden_size = number("embedding_length")
    embedding = next((tensor for tensor in file.tensors if tensor.name == "token_embd.weight"), None)
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{path} has no 'token_embd.weight'; it is not a whole language model")
    return Architecture(
        family=family,
        num_layers=number("block_count"),
        num_heads=num_heads,
        num_kv_heads=number("attention.head_count_kv", num_heads),
        head_size=number("attention.key_length", hidden_size // num_heads),
        hidden_size=hidden_size,
        vocab_size=embedding.shape[0],
        context_length=number("context_length", 2048),
    )


def _family(file: GgufFile) -> str:
    """Raises ModelError for a family, or a kind of vocabulary, that is not supported."""
    family = file.metadata.get("general.architecture")
    if family not in FAMILIES:
        raise ModelError(
            f"{file.path} holds a '{family}' model, which is not supported; supported: {', '.join(FAMILIES)}"
        )
    vocabulary = file.metadata.get("tokenizer.ggml.model")
    if vocabulary != "gpt2" or not file.metadata.get("tokenizer.ggml.tokens"):
        raise ModelError(
            f"{file.path} has a '{vocabulary}' vocabulary, which is not supported; supported: byte-level BPE ('gpt2')"
        )
    return str(family)
