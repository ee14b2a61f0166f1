"""resolve_model: from what the operator wrote after --model to a ModelSource.

Tried in this order: a catalog name; an existing path (a GGUF file, or a folder with an OpenVINO IR and its tokenizer);
a Hugging Face repo id, `org/name`, that holds one of these. A second start neither hashes nor converts again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tidegate.models import cache, catalog, fetch
from tidegate.models.convert import convert_gguf
from tidegate.models.errors import ModelError
from tidegate.models.gguf_file import check_supported, read_gguf
from tidegate.models.progress import byte_bar
from tidegate.models.source import ModelSource, TokenizerSource

_END_OF_TURN = ("<|im_end|>", "<|eot_id|>")
"""Tokens that end an answer even where a file's metadata names only the end of a text."""


def resolve_model(spec: str, progress: bool = True) -> ModelSource:
    """Fetch, check and convert as needed; `progress` shows bars on stderr. Raises ModelError."""
    model = catalog.find(spec)
    if model is not None:
        return load_gguf(
            fetch.pull_model(model, progress), name=model.name, digest=model.gguf_sha256, progress=progress
        )
    path = Path(spec).expanduser()
    if path.is_file():
        return load_gguf(path, progress=progress)
    raise ModelError(_not_found(spec))


def load_gguf(path: Path, *, name: str = "", digest: str = "", progress: bool = True) -> ModelSource:
    """A GGUF file, converted. `digest` is given where it is known already. Raises ModelError."""
    file = read_gguf(path)
    architecture = check_supported(file)
    name = name or path.stem
    if not digest:
        with (
            cache.disk_errors(f"cannot read {path}"),
            byte_bar(f"checking {name}", path.stat().st_size, show=progress) as report,
        ):
            digest = cache.remembered_sha256(path, report)
    metadata = file.metadata
    return ModelSource(
        name=name,
        ir_path=convert_gguf(path, digest, name, progress),
        weight_digest=digest,
        weight_format=file.weight_format,
        architecture=architecture,
        tokenizer=TokenizerSource("gguf", path),
        chat_template=metadata.get("tokenizer.chat_template"),
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=metadata.get("tokenizer.ggml.eos_token_id"),
        stop_token_ids=_gguf_stop_ids(metadata),
    )


def _gguf_stop_ids(metadata: dict[str, Any]) -> tuple[int, ...]:
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = {metadata[f"tokenizer.ggml.{key}"] for key in keys if f"tokenizer.ggml.{key}" in metadata}
    tokens = metadata["tokenizer.ggml.tokens"]
    ids |= {tokens.index(token) for token in _END_OF_TURN if token in tokens}
    return tuple(sorted(ids))


def _not_found(spec: str) -> str:
    known = ", ".join(model.name for model in catalog.list_models())
    return (
        f"no model '{spec}': it is no catalog name ({known}), and no such file or folder exists; pass one of these, "
        "a GGUF file, or a folder with an OpenVINO IR"
    )
