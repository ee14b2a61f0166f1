"""Tokenizers for the text tests: the default model's with its reference encoding, and two tiny ones made in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from tests.tiny_models import CHAT_TEMPLATE, tiny_vocabulary
from tidegate.text.tokenizer import Tokenizer
from tidegate.text.tokenizer_spec import spec_from_metadata

if TYPE_CHECKING:
    from tidegate.models import ModelSource


def tiny_metadata(**changes: Any) -> dict[str, Any]:
    """GGUF metadata of a byte-level tokenizer with 3 special tokens, the 256 bytes and some merges."""
    tokens, types, merges = tiny_vocabulary()
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": CHAT_TEMPLATE,
        **changes,
    }


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    """GGUF metadata of a SentencePiece-like tokenizer: unknown, start and end tokens, bytes, and some pieces."""
    pieces = ["\u2581", "h", "e", "l", "o", "he", "ll", "llo", "hello", "\u2581hello", "<", "s", ">", "\u2581w"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(len(pieces), 0, -1)],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **changes,
    }


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Tokenizer:
    return Tokenizer(spec_from_metadata(tiny_metadata(), source="tiny"))


@pytest.fixture(scope="session")
def sentencepiece_tokenizer() -> Tokenizer:
    return Tokenizer(spec_from_metadata(sentencepiece_metadata(), source="tiny"))


@pytest.fixture(scope="session")
def tokenizer(default_model: ModelSource) -> Tokenizer:
    return Tokenizer.from_path(default_model.tokenizer.path)


@pytest.fixture(scope="session")
def reference(default_model: ModelSource) -> Any:
    """The default model's reference: openvino_genai's own tokenizer."""
    import openvino_genai

    return openvino_genai.Tokenizer(str(default_model.tokenizer.path))


@pytest.fixture(scope="session")
def reference_encode(reference: Any) -> Callable[..., list[int]]:
    def encode(text: str, add_special_tokens: bool = True) -> list[int]:
        encoded = reference.encode(text, add_special_tokens=add_special_tokens)
        ids: list[int] = encoded.input_ids.data.reshape(-1).tolist()
        return ids

    return encode
