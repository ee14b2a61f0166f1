"""resolve_model, for real: every family is converted, a second start does no work twice, mistakes are one line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import openvino
import pytest

from tests.tiny_models import CHAT_TEMPLATE, write_tiny_gguf
from tidegate.models import cache, convert, load
from tidegate.models.catalog import list_models
from tidegate.models.errors import ModelError
from tidegate.models.load import resolve_model
from tidegate.models.source import ModelSource
from tidegate.models.subprocesses import ChildResult


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"family": "llama", "num_kv_heads": 4}, id="llama-mha"),
        pytest.param({"family": "llama", "num_kv_heads": 2, "weight_type": "Q4_1"}, id="llama-gqa-q4_1"),
        pytest.param({"family": "llama", "num_kv_heads": 1, "weight_type": "F16"}, id="llama-mqa-f16"),
        pytest.param({"family": "qwen2", "tied_embeddings": True, "weight_type": "Q4_0"}, id="qwen2-tied-q4_0"),
        pytest.param({"family": "qwen3", "head_size": 64, "hidden_size": 128}, id="qwen3-wide-heads"),
    ],
)
def test_each_family_converts_to_an_ir_of_its_shape(tmp_path: Path, options: dict[str, object]) -> None:
    path = write_tiny_gguf(tmp_path / "my-model.gguf", **options)  # type: ignore[arg-type]
    source = resolve_model(str(path), progress=False)
    shape = source.architecture
    assert (source.name, source.weight_format) == ("my-model", options.get("weight_type", "Q8_0"))
    assert (source.bos_token_id, source.eos_token_id, source.stop_token_ids) == (1, 2, (2,))
    assert source.chat_template == CHAT_TEMPLATE
    assert source.tokenizer.kind == "gguf" and source.tokenizer.path == path

    model = openvino.Core().read_model(source.ir_path)
    caches = [op for op in model.get_ops() if op.get_type_name() == "ReadValue"]
    assert len(caches) == 2 * shape.num_layers
    for read in caches:
        assert read.output(0).partial_shape[1].get_length() == shape.num_kv_heads
        assert read.output(0).partial_shape[3].get_length() == shape.head_size
    assert model.output(0).partial_shape[2].get_length() == shape.vocab_size
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cache-home", "my-model.gguf"], "nothing beside the file"


def test_stretched_rotary_frequencies_are_kept(tmp_path: Path) -> None:
    factors = tuple(1.0 + i for i in range(16))
    plain = resolve_model(str(write_tiny_gguf(tmp_path / "plain.gguf")), progress=False)
    stretched = resolve_model(str(write_tiny_gguf(tmp_path / "long.gguf", rope_factors=factors)), progress=False)
    np.testing.assert_allclose(_rope_frequencies(plain), 10000.0 ** (-np.arange(16) / 16), rtol=1e-5)
    np.testing.assert_allclose(_rope_frequencies(stretched) * factors, _rope_frequencies(plain), rtol=1e-6)


def _rope_frequencies(source: ModelSource) -> np.ndarray:
    constants = [op for op in openvino.Core().read_model(source.ir_path).get_ops() if op.get_type_name() == "Constant"]
    return next(op.data.flatten() for op in constants if list(op.shape) == [1, source.architecture.head_size // 2, 1])


def test_second_start_neither_hashes_nor_converts(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = resolve_model(str(tiny_gguf), progress=False)

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("done twice")

    monkeypatch.setattr(convert, "run_child", fail)
    monkeypatch.setattr(cache, "sha256_file", fail)
    assert resolve_model(str(tiny_gguf), progress=False) == first


def test_changed_file_is_another_model(tiny_gguf: Path) -> None:
    first = resolve_model(str(tiny_gguf), progress=False)
    stat = tiny_gguf.stat()
    write_tiny_gguf(tiny_gguf, seed=1)
    os.utime(tiny_gguf, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    second = resolve_model(str(tiny_gguf), progress=False)
    assert first.weight_digest != second.weight_digest and first.ir_path != second.ir_path


def test_damaged_conversion_is_made_again(tiny_gguf: Path) -> None:
    source = resolve_model(str(tiny_gguf), progress=False)
    weights = source.ir_path.with_suffix(".bin")
    content = weights.read_bytes()
    weights.write_bytes(content[:1000])
    assert resolve_model(str(tiny_gguf), progress=False) == source
    assert weights.read_bytes() == content


def test_failed_conversion_leaves_nothing_and_says_why(
    tiny_gguf: Path, cache_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for result, message in [
        (ChildResult(1, "Traceback\nRuntimeError: cannot do this\n"), "cannot read .*cannot do this"),
        (ChildResult(-9, ""), "ended by signal 9.*memory"),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(convert, "run_child", lambda *_, result=result, **__: result)
            with pytest.raises(ModelError, match=message):
                resolve_model(str(tiny_gguf), progress=False)
        assert list((cache_home / "tidegate" / "work").iterdir()) == []
        assert not (cache_home / "tidegate" / "ir").exists()
    resolve_model(str(tiny_gguf), progress=False)


def test_leftovers_of_a_killed_conversion_are_removed(tiny_gguf: Path, cache_home: Path) -> None:
    digest = cache.sha256_file(tiny_gguf)
    leftover = cache_home / "tidegate" / "work" / f"convert-{convert.ir_folder(digest).name}.dead"
    leftover.mkdir(parents=True)
    (leftover / "openvino_model.bin").write_bytes(b"half")
    resolve_model(str(tiny_gguf), progress=False)
    assert not leftover.exists()


def test_loading_does_not_import_openvino(tiny_gguf: Path) -> None:
    script = (
        "import sys; from tidegate.models.load import resolve_model; resolve_model(sys.argv[1], progress=False);"
        "sys.exit('openvino' in sys.modules or 'openvino_genai' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script, str(tiny_gguf)], check=False).returncode == 0


def test_catalog_model_is_served_under_its_name(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = list_models()[0]
    monkeypatch.setattr(load.fetch, "pull_model", lambda found, progress: tiny_gguf)
    source = resolve_model(model.name, progress=False)
    assert (source.name, source.weight_digest) == (model.name, model.gguf_sha256)


@pytest.fixture
def ir_folder(tiny_gguf: Path, tmp_path: Path) -> Path:
    """A folder with an IR and the GGUF that it was made from."""
    source = resolve_model(str(tiny_gguf), progress=False)
    folder = tmp_path / "my-ir"
    folder.mkdir()
    for suffix in (".xml", ".bin"):
        shutil.copy(source.ir_path.with_suffix(suffix), folder)
    shutil.copy(tiny_gguf, folder)
    return folder


def _with_json_files(folder: Path) -> None:
    """In place of the GGUF, the files that an export from Hugging Face brings."""
    (folder / "tiny.gguf").unlink()
    added = [{"id": 1, "content": "<s>"}, {"id": 2, "content": "</s>"}, {"id": 7, "content": "<end>"}]
    config = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 128,
        "vocab_size": 303,
        "max_position_embeddings": 512,
    }
    files = {
        "tokenizer.json": {"added_tokens": added, "model": {"type": "BPE"}},
        "tokenizer_config.json": {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": "T"},
        "config.json": config,
        "generation_config.json": {"eos_token_id": [7, 2]},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))


def test_ir_folder_with_a_gguf_beside_it(ir_folder: Path) -> None:
    source = resolve_model(str(ir_folder), progress=False)
    assert (source.name, source.weight_format) == ("my-ir", "int8")
    assert source.ir_path == ir_folder / "openvino_model.xml"
    assert source.tokenizer.kind == "gguf"
    assert source.architecture.num_kv_heads == 2


def test_ir_folder_with_tokenizer_json(ir_folder: Path) -> None:
    by_gguf = resolve_model(str(ir_folder), progress=False)
    _with_json_files(ir_folder)
    source = resolve_model(str(ir_folder), progress=False)
    assert source.tokenizer.kind == "tokenizer.json" and source.tokenizer.path == ir_folder / "tokenizer.json"
    assert (source.bos_token_id, source.eos_token_id, source.stop_token_ids) == (1, 2, (2, 7))
    assert source.chat_template == "T"
    assert source.architecture == by_gguf.architecture
    assert source.weight_digest == by_gguf.weight_digest
    (ir_folder / "chat_template.jinja").write_text("newer")
    assert resolve_model(str(ir_folder), progress=False).chat_template == "newer"


def test_ir_without_tokenizer_is_refused(ir_folder: Path) -> None:
    (ir_folder / "tiny.gguf").unlink()
    with pytest.raises(ModelError, match=r"no tokenizer; put tokenizer\.json"):
        resolve_model(str(ir_folder), progress=False)


def test_ir_without_config_is_refused(ir_folder: Path) -> None:
    _with_json_files(ir_folder)
    (ir_folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"has no config\.json"):
        resolve_model(str(ir_folder), progress=False)


@pytest.mark.parametrize(("suffix", "message"), [(".bin", "needs .* bytes"), (".xml", "truncated or no OpenVINO IR")])
def test_truncated_ir_is_refused(ir_folder: Path, suffix: str, message: str) -> None:
    file = ir_folder / f"openvino_model{suffix}"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match=message):
        resolve_model(str(ir_folder), progress=False)


def test_ir_without_weights_is_refused(ir_folder: Path) -> None:
    (ir_folder / "openvino_model.bin").unlink()
    with pytest.raises(ModelError, match=r"openvino_model\.bin: No such file"):
        resolve_model(str(ir_folder), progress=False)


def test_ir_of_something_else_is_refused(ir_folder: Path) -> None:
    xml = ir_folder / "openvino_model.xml"
    xml.write_bytes(xml.read_bytes().replace(b"ReadValue", b"Parameter"))
    with pytest.raises(ModelError, match="no stateful language model"):
        resolve_model(str(ir_folder), progress=False)


@pytest.mark.parametrize("spec", ["no-such-model", "./no/such/file.gguf", "/no/such/folder", "x" * 5000, "a\0b"])
def test_unknown_model_says_what_can_be_given(spec: str) -> None:
    with pytest.raises(ModelError, match=r"smollm2-135m.*GGUF.*IR"):
        resolve_model(spec, progress=False)


def test_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no openvino_model\.xml and no GGUF"):
        resolve_model(str(tmp_path), progress=False)


def test_cache_that_cannot_be_written_is_one_line(tiny_gguf: Path, cache_home: Path) -> None:
    cache_home.write_text("a file where the folder should be")
    with pytest.raises(ModelError, match="set XDG_CACHE_HOME") as caught:
        resolve_model(str(tiny_gguf), progress=False)
    assert "\n" not in str(caught.value)
