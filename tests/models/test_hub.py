"""Models from a Hugging Face repository, out of a local cache, offline."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

from tests.tiny_models import write_tiny_gguf
from tidegate.models import hub
from tidegate.models.errors import ModelError
from tidegate.models.load import resolve_model

_COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hugging Face cache, without network."""
    folder = tmp_path / "hub"
    folder.mkdir()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return folder


def _repo(hub_cache: Path, repo: str) -> Path:
    """The snapshot folder of a cached repository."""
    root = hub_cache / f"models--{repo.replace('/', '--')}"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(_COMMIT)
    snapshot = root / "snapshots" / _COMMIT
    snapshot.mkdir(parents=True)
    return snapshot


def test_repo_with_one_gguf_is_loaded_under_its_name(hub_cache: Path) -> None:
    snapshot = _repo(hub_cache, "org/tiny-GGUF")
    # As the library stores it: a link to a file named by its digest.
    blob = write_tiny_gguf(hub_cache / "blob")
    (snapshot / "tiny.gguf").symlink_to(blob)
    source = resolve_model("org/tiny-GGUF", progress=False)
    assert source.name == "tiny-GGUF"
    assert source.tokenizer.path == snapshot / "tiny.gguf"
    assert resolve_model("org/tiny-GGUF:tiny.gguf", progress=False) == source


def test_repo_with_several_ggufs_wants_one_named(hub_cache: Path) -> None:
    snapshot = _repo(hub_cache, "org/many")
    for name in ("a.gguf", "b.gguf"):
        write_tiny_gguf(snapshot / name)
    with pytest.raises(ModelError, match=r"several GGUF files; name one, like org/many:a\.gguf"):
        resolve_model("org/many", progress=False)
    assert hub.fetch_repo("org/many:b.gguf", progress=False) == snapshot / "b.gguf"
    with pytest.raises(ModelError, match=r"no 'c\.gguf'; it has: a\.gguf, b\.gguf"):
        resolve_model("org/many:c.gguf", progress=False)


def test_repo_with_an_ir_is_a_folder(hub_cache: Path) -> None:
    snapshot = _repo(hub_cache, "org/ir")
    for name in ("openvino_model.xml", "openvino_model.bin", "tokenizer.json"):
        (snapshot / name).write_text("{}")
    with pytest.raises(ModelError, match=r"OpenVINO IR but no config\.json"):
        hub.fetch_repo("org/ir", progress=False)
    (snapshot / "config.json").write_text("{}")
    assert hub.fetch_repo("org/ir", progress=False) == snapshot


def test_repo_without_a_model_of_ours_is_refused(hub_cache: Path) -> None:
    (_repo(hub_cache, "org/torch") / "model.safetensors").write_text("")
    with pytest.raises(ModelError, match="neither a GGUF file nor an OpenVINO IR"):
        resolve_model("org/torch", progress=False)


def test_uncached_repo_without_network_is_one_line() -> None:
    with pytest.raises(
        ModelError, match="cannot fetch 'org/absent' from Hugging Face, and no copy is cached"
    ) as caught:
        resolve_model("org/absent", progress=False)
    assert "\n" not in str(caught.value)


def test_missing_extra_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def without_hub(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "huggingface_hub":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_hub)
    with pytest.raises(ModelError, match=r"pip install 'tidegate\[hf\]'"):
        resolve_model("org/name", progress=False)
