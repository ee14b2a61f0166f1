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
from tidegate.models.gguf_file import GgufFile, check_convertible, read_architecture, read_gguf
from tidegate.models.hub import fetch_repo, is_repo_spec
from tidegate.models.openvino_ir import check_ir, ir_digest, load_ir_folder
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
    if _exists(path):
        return load_path(path, name=path.resolve().stem if path.is_file() else path.resolve().name, progress=progress)
    if is_repo_spec(spec):
        repo_name = spec.partition(":")[0].partition("/")[2]
        return load_path(fetch_repo(spec, progress), name=repo_name, progress=progress)
    raise ModelError(_not_found(spec))


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # Too long for a path, or holding what no path can hold.
        return False


def load_path(path: Path, *, name: str, progress: bool = True) -> ModelSource:
    """A GGUF file, or a folder with an IR and its tokenizer. Raises ModelError."""
    if path.is_file():
        return load_gguf(path, name=name, progress=progress)
    ggufs = sorted(path.glob("*.gguf"))
    if not (path / "openvino_model.xml").is_file():
        if len(ggufs) == 1:
            return load_gguf(ggufs[0], name=name, progress=progress)
        what = f"{len(ggufs)} GGUF files; pass one of them" if ggufs else "no openvino_model.xml and no GGUF file"
        raise ModelError(f"folder {path} has {what}")
    if (path / "tokenizer.json").is_file():
        return load_ir_folder(path, name=name, progress=progress)
    if len(ggufs) != 1:
        raise ModelError(
            f"folder {path} has an OpenVINO IR but no tokenizer; put tokenizer.json, tokenizer_config.json and "
            "config.json, or the GGUF file that it was made from, beside it"
        )
    weight_format = check_ir(path)
    file = read_gguf(ggufs[0])
    return _from_gguf(
        file,
        name=name,
        ir_path=path / "openvino_model.xml",
        digest=ir_digest(path, name, progress),
        weight_format=weight_format,
    )


def load_gguf(path: Path, *, name: str, digest: str = "", progress: bool = True) -> ModelSource:
    """A GGUF file, converted. `digest` is given where it is known already. Raises ModelError."""
    file = read_gguf(path)
    check_convertible(file)
    read_architecture(file)  # What is wrong with it is told before the work of hashing and converting.
    if not digest:
        digest = _gguf_digest(path, name, progress)
    ir_path = convert_gguf(file, digest, name, progress)
    return _from_gguf(file, name=name, ir_path=ir_path, digest=digest, weight_format=file.weight_format)


def _gguf_digest(path: Path, name: str, progress: bool) -> str:
    with cache.disk_errors(f"cannot read {path}"):
        known = cache.known_sha256(path)
        if known is not None:
            return known
        with byte_bar(f"checking {name}", path.stat().st_size, show=progress) as report:
            return cache.remembered_sha256(path, report)


def _from_gguf(file: GgufFile, *, name: str, ir_path: Path, digest: str, weight_format: str) -> ModelSource:
    metadata = file.metadata
    return ModelSource(
        name=name,
        ir_path=ir_path,
        weight_digest=digest,
        weight_format=weight_format,
        architecture=read_architecture(file),
        tokenizer=TokenizerSource("gguf", file.path),
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
        "a GGUF file, a folder with an OpenVINO IR, or a Hugging Face repo id (org/name)"
    )
