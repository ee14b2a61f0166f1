"""Conversion of a GGUF file to an OpenVINO IR in the cache, once per file content.

OpenVINO GenAI's reader writes beside the file it reads, so it reads a link in a work folder. It runs in a process of
its own (child.py): it needs memory for a few copies of the weights, and a file that it cannot read must not take us
down. What the reader leaves out or rounds is put right there, before the IR gets its name in the cache.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path

from tidegate.models import cache
from tidegate.models.errors import ModelError
from tidegate.models.gguf_file import GgufFile, rope_factors
from tidegate.models.progress import byte_bar
from tidegate.models.subprocesses import run_child

_LAYOUT_VERSION = 2
"""Raised when what a conversion writes changes; files converted before are then converted again."""
_KEPT = ("openvino_model.xml", "openvino_model.bin")


def convert_gguf(file: GgufFile, digest: str, name: str, progress: bool = True) -> Path:
    """The .xml of the IR made from `file`, whose SHA-256 is `digest`. Raises ModelError."""
    folder = ir_folder(digest)
    if is_converted(folder):
        return folder / "openvino_model.xml"

    def say_waiting() -> None:
        if progress:
            print(f"waiting for another tidegate that is converting {name} ...", file=sys.stderr, flush=True)

    key = f"convert-{folder.name}"
    with cache.disk_errors(f"cannot convert {name}"), cache.locked(key, say_waiting):
        if not is_converted(folder):
            cache.need_space(file.path.stat().st_size * 5 // 2, f"converting {name}")
            with cache.work_dir(key) as work:
                cache.publish(_convert(file, name, work, progress), folder)
    return folder / "openvino_model.xml"


def ir_folder(digest: str) -> Path:
    """Where the IR of a GGUF with this digest lies. Another version of the reader may write another IR."""
    version = importlib.metadata.version("openvino-genai")
    return cache.cache_dir() / "ir" / f"{digest[:32]}-{version}-{_LAYOUT_VERSION}"


def is_converted(folder: Path) -> bool:
    """Whether the folder holds files of the sizes that were written there."""
    try:
        sizes = json.loads((folder / "sizes.json").read_text(encoding="utf-8"))
        return all((folder / name).stat().st_size == sizes[name] for name in _KEPT)
    except (OSError, ValueError, KeyError):
        return False


def _convert(file: GgufFile, name: str, work: Path, progress: bool) -> Path:
    link = work / "model.gguf"
    link.symlink_to(file.path.resolve())
    factors = rope_factors(file)
    arguments = [str(link), *(("--rope-factors", ",".join(map(repr, factors))) if factors else ())]
    with byte_bar(f"converting {name}", None, show=progress) as report:
        result = run_child("convert", arguments, folder=work, on_tick=lambda: report(0))
    if result.returncode < 0:
        raise ModelError(
            f"converting {name} was ended by signal {-result.returncode}; it needs about four times the file's size in "
            "memory"
        )
    if result.returncode != 0:
        lines = [line.strip() for line in result.output.splitlines() if line.strip()]
        reason = lines[-1] if lines else f"exit code {result.returncode}"
        raise ModelError(f"OpenVINO GenAI cannot read {file.path}: {reason[:300]}")
    made = work / "ir"
    made.mkdir()
    for file_name in _KEPT:
        (work / file_name).rename(made / file_name)
    cache.write_json(made / "sizes.json", {file_name: (made / file_name).stat().st_size for file_name in _KEPT})
    return made
