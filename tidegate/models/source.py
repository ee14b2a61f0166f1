"""ModelSource: everything the rest of tidegate needs to know about a model before running it. Plain, frozen data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True)
class Architecture:
    """The shape of a decoder. KV bytes a token = 2 * num_layers * num_kv_heads * head_size * bytes a value.

    `context_length` is the longest sequence the model was made for, in tokens.
    """

    family: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    hidden_size: int
    vocab_size: int
    context_length: int


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """Where the vocabulary is: in the metadata of a GGUF file, or in a folder's tokenizer.json (`path` is the file)."""

    kind: Literal["gguf", "tokenizer.json"]
    path: Path


@dataclass(frozen=True, slots=True)
class ModelSource:
    """One model, ready to be served.

    `name` is the default served name. `ir_path` is the OpenVINO IR's .xml; its .bin lies beside it. `weight_digest` is
    a hex SHA-256 of the weights: of the GGUF file, or of an IR's two files. `weight_format` is how most weights are
    stored ("Q4_1", "int8", ...). `stop_token_ids` are the ids that end an answer, `eos_token_id` among them, as the
    model's own files say.
    """

    name: str
    ir_path: Path
    weight_digest: str
    weight_format: str
    architecture: Architecture
    tokenizer: TokenizerSource
    chat_template: str | None
    bos_token_id: int | None
    eos_token_id: int | None
    stop_token_ids: tuple[int, ...]
