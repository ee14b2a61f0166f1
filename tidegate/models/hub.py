"""Hugging Face repositories, through the optional extra `hf`: which of a repository's files we need, and getting them.

A copy in the Hugging Face cache is used as it is, without the network; so a later start needs none, and an update is
the operator's own decision. The library's own settings (HF_HOME, HF_HUB_OFFLINE, HF_TOKEN, ...) hold.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tidegate.models.errors import ModelError

_REPO_SPEC = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::(?P<file>[\w.-]+\.gguf))?")
_IR_FILES = ("openvino_model.xml", "openvino_model.bin", "tokenizer.json", "config.json")
_IR_EXTRAS = ("generation_config.json", "tokenizer_config.json", "chat_template.jinja")


def is_repo_spec(spec: str) -> bool:
    """Whether it reads as `org/name` or `org/name:FILE.gguf`."""
    return _REPO_SPEC.fullmatch(spec) is not None


def fetch_repo(spec: str, progress: bool = True) -> Path:
    """The GGUF file, or the folder with an IR, of a repository. Raises ModelError."""
    match = _REPO_SPEC.fullmatch(spec)
    if match is None:
        raise ModelError(f"'{spec}' is no Hugging Face repo id; write org/name or org/name:FILE.gguf")
    repo, file = match["repo"], match["file"]
    try:
        import huggingface_hub
    except ImportError:
        raise ModelError(
            f"'{spec}' reads as a Hugging Face repo id, which needs an extra: pip install 'tidegate[hf]' "
            "(if it is a path, it does not exist)"
        ) from None
    cached = _cached_snapshot(huggingface_hub, repo)
    if cached is not None:
        files = [path.relative_to(cached).as_posix() for path in cached.rglob("*") if path.is_file()]
        try:
            return _local_path(cached, _choose(repo, file, files))
        except ModelError as error:
            missing = error  # Perhaps only not fetched yet.
    else:
        missing = None
    return _download(huggingface_hub, repo, file, progress, missing)


def _download(hub: Any, repo: str, file: str | None, progress: bool, missing: ModelError | None) -> Path:
    if not progress:
        hub.utils.disable_progress_bars()
    try:
        wanted = _choose(repo, file, hub.HfApi().list_repo_files(repo))
        folder = hub.snapshot_download(repo, allow_patterns=[*wanted, *(_IR_EXTRAS if len(wanted) > 1 else ())])
    except hub.errors.RepositoryNotFoundError:
        raise ModelError(
            f"no Hugging Face repository '{repo}', or it is private and HF_TOKEN does not open it"
        ) from None
    except ModelError:
        raise
    except Exception as error:  # The library raises those of several HTTP libraries.
        if missing is not None:
            raise ModelError(f"{missing} (seen in the local cache; the hub cannot be reached)") from None
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"cannot fetch '{repo}' from Hugging Face, and no copy is cached: {reason[:300]}") from None
    return _local_path(Path(folder), wanted)


def _choose(repo: str, file: str | None, files: list[str]) -> list[str]:
    """The files to fetch: one GGUF, or an IR with its tokenizer. Raises ModelError when there is no one answer."""
    ggufs = sorted(name for name in files if name.endswith(".gguf"))
    if file is not None:
        if file not in ggufs:
            raise ModelError(f"'{repo}' has no '{file}'; it has: {', '.join(ggufs) or 'no GGUF file'}")
        return [file]
    if _IR_FILES[0] in files:
        absent = [name for name in _IR_FILES if name not in files]
        if absent:
            raise ModelError(f"'{repo}' holds an OpenVINO IR but no {', '.join(absent)}")
        return list(_IR_FILES)
    if len(ggufs) == 1:
        return ggufs
    if ggufs:
        raise ModelError(
            f"'{repo}' holds several GGUF files; name one, like {repo}:{ggufs[0]} (has: {', '.join(ggufs)})"
        )
    raise ModelError(f"'{repo}' holds neither a GGUF file nor an OpenVINO IR (openvino_model.xml)")


def _local_path(folder: Path, wanted: list[str]) -> Path:
    return folder / wanted[0] if len(wanted) == 1 else folder


def _cached_snapshot(hub: Any, repo: str) -> Path | None:
    try:
        return Path(hub.snapshot_download(repo, local_files_only=True))
    except hub.errors.LocalEntryNotFoundError:
        return None
