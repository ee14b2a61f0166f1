"""Reading a folder with an OpenVINO IR and its tokenizer, as `optimum-cli export openvino` writes it, without OpenVINO.

    openvino_model.xml, openvino_model.bin      the model: stateful, with inputs input_ids, position_ids, ...
    config.json, generation_config.json         its shape and the ids that end an answer
    tokenizer.json, tokenizer_config.json       vocabulary and chat template (chat_template.jinja goes before)
    or, in place of these five, one .gguf       whose metadata says the same

Owns: finding out that one of these is missing, cut short or of the wrong kind. Invariant: the weights are not read,
only hashed once.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from tidegate.models import cache
from tidegate.models.errors import ModelError
from tidegate.models.progress import byte_bar
from tidegate.models.source import Architecture, ModelSource, TokenizerSource

_CONST = re.compile(rb'<data element_type="(\w+)"[^>]*?offset="(\d+)" size="(\d+)"')
_FORMATS = {
    "u4": "int4",
    "i4": "int4",
    "nf4": "nf4",
    "u8": "int8",
    "i8": "int8",
    "f16": "f16",
    "bf16": "bf16",
    "f32": "f32",
}


def load_ir_folder(folder: Path, *, name: str, progress: bool = True) -> ModelSource:
    """The model of a folder that has tokenizer.json and config.json. Raises ModelError."""
    config = _read_json(folder / "config.json", required=True)
    generation = _read_json(folder / "generation_config.json")
    tokenizer_config = _read_json(folder / "tokenizer_config.json")
    token_ids = _special_token_ids(_read_json(folder / "tokenizer.json", required=True))
    stop_ids = set(_id_list(generation.get("eos_token_id"))) | set(_id_list(config.get("eos_token_id")))
    eos_name = _token_text(tokenizer_config.get("eos_token"))
    eos_id = token_ids.get(eos_name, min(stop_ids, default=None)) if eos_name else min(stop_ids, default=None)
    if eos_id is not None:
        stop_ids.add(eos_id)
    bos_name = _token_text(tokenizer_config.get("bos_token"))
    bos_ids = _id_list(config.get("bos_token_id"))
    return ModelSource(
        name=name,
        ir_path=folder / "openvino_model.xml",
        weight_digest=ir_digest(folder, name, progress),
        weight_format=check_ir(folder),
        architecture=_architecture(folder, config),
        tokenizer=TokenizerSource("tokenizer.json", folder / "tokenizer.json"),
        chat_template=_chat_template(folder, tokenizer_config),
        bos_token_id=token_ids.get(bos_name) if bos_name else (bos_ids[0] if bos_ids else None),
        eos_token_id=eos_id,
        stop_token_ids=tuple(sorted(stop_ids)),
    )


def check_ir(folder: Path) -> str:
    """The format of most of the weights. Raises ModelError when the IR is missing, cut short or no language model."""
    xml, weights = folder / "openvino_model.xml", folder / "openvino_model.bin"
    try:
        graph, num_bytes = xml.read_bytes(), weights.stat().st_size
    except OSError as error:
        raise ModelError(f"cannot read {error.filename}: {error.strerror}; an IR is both .xml and .bin") from None
    if not graph.rstrip().endswith(b"</net>"):
        raise ModelError(f"{xml} is truncated or no OpenVINO IR; export or copy it again")
    by_type: Counter[str] = Counter()
    for element_type, offset, size in _CONST.findall(graph):
        by_type[element_type.decode()] += int(size)
        if int(offset) + int(size) > num_bytes:
            raise ModelError(
                f"{weights} is truncated: its graph needs {int(offset) + int(size):,} bytes and it has {num_bytes:,}; "
                "export or copy it again"
            )
    if b'names="input_ids"' not in graph or b'type="ReadValue"' not in graph:
        raise ModelError(
            f"{xml} is no stateful language model; export it with "
            "'optimum-cli export openvino --task text-generation-with-past'"
        )
    stored = by_type.most_common(1)[0][0] if by_type else "unknown"
    return _FORMATS.get(stored, stored)


def ir_digest(folder: Path, name: str, progress: bool) -> str:
    """Hex SHA-256 over the digests of the two files."""
    weights = folder / "openvino_model.bin"
    with cache.disk_errors(f"cannot read {folder}"):
        graph_digest = cache.remembered_sha256(folder / "openvino_model.xml")
        if (known := cache.known_sha256(weights)) is None:
            with byte_bar(f"checking {name}", weights.stat().st_size, show=progress) as report:
                known = cache.remembered_sha256(weights, report)
    return hashlib.sha256(f"{graph_digest}{known}".encode()).hexdigest()


def _architecture(folder: Path, config: dict[str, Any]) -> Architecture:
    def number(key: str, default: int | None = None) -> int:
        value = config.get(key, default)
        if not isinstance(value, int) or value <= 0:
            raise ModelError(f"{folder / 'config.json'} lacks a usable '{key}'; it is not a decoder's configuration")
        return value

    num_heads = number("num_attention_heads")
    hidden_size = number("hidden_size")
    return Architecture(
        family=str(config.get("model_type", "unknown")),
        num_layers=number("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=number("num_key_value_heads", num_heads),
        head_size=number("head_dim", hidden_size // num_heads),
        hidden_size=hidden_size,
        vocab_size=number("vocab_size"),
        context_length=number("max_position_embeddings", 2048),
    )


def _chat_template(folder: Path, tokenizer_config: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):  # Several, by name.
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if not required:
            return {}
        raise ModelError(f"{path.parent} has no {path.name}; export the model with its tokenizer") from None
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ModelError(f"{path} is damaged ({error}); export or copy it again") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} is damaged (not a JSON object); export or copy it again")
    return content


def _special_token_ids(tokenizer: dict[str, Any]) -> dict[str, int]:
    return {str(token.get("content")): int(token.get("id", -1)) for token in tokenizer.get("added_tokens") or []}


def _token_text(token: object) -> str | None:
    """tokenizer_config.json writes a token as its text, or as an object that holds it."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _id_list(value: object) -> list[int]:
    """An id, a list of ids or nothing."""
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, int) and not isinstance(item, bool)]
