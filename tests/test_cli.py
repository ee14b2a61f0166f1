"""The command line: flags reach the config, mistakes are one line, and help needs nothing heavy."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from tidegate.cli import main
from tidegate.config import Config, ConfigError, flag_name, flags
from tidegate.version import __version__


@dataclass
class Ran:
    exit_code: int
    out: str
    err: str


@pytest.fixture
def run_cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    def run(*arguments: str) -> Ran:
        monkeypatch.setattr(sys, "argv", ["tidegate", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        captured = capsys.readouterr()
        code = caught.value.code
        return Ran(code if isinstance(code, int) else 0 if code is None else 1, captured.out, captured.err)

    return run


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The configs that `serve` was called with; nothing is served."""
    configs: list[Config] = []
    module = ModuleType("tidegate.api.serve")

    def run(config: Config, reload: object = None) -> int:
        configs.append(config)
        if config.model.model == "damaged.gguf":
            raise ConfigError("damaged.gguf is cut off; fetch it again")
        return 0

    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tidegate.api.serve", module)
    return configs


def test_version(run_cli: Callable[..., Ran]) -> None:
    ran = run_cli("--version")
    assert (ran.exit_code, ran.out) == (0, f"tidegate {__version__}\n")


def test_help_of_serve_explains_every_flag(run_cli: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    ran = run_cli("serve", "--help")
    text = " ".join(ran.out.replace("│", " ").split())
    assert ran.exit_code == 0
    assert "--config" in text
    for flag in flags():
        assert f"{flag_name(flag.name)} " in text
        assert f"Default: {flag.default}." in text if flag.default else True


def test_no_arguments_show_the_commands(run_cli: Callable[..., Ran]) -> None:
    ran = run_cli()
    for command in ("serve", "chat", "explain", "model", "bench"):
        assert command in ran.out + ran.err


def test_flags_and_file_reach_the_config(run_cli: Callable[..., Ran], served: list[Config], tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("[server]\nport = 9000\n[scheduler]\nmax_num_seqs = 4\n", encoding="utf-8")
    arguments = ["--config", str(path), "--port", "8123", "--kv-memory", "512MiB", "--drain-timeout", "250ms"]
    ran = run_cli("serve", *arguments, "--no-enable-prefix-caching", "--executor", "sim")
    assert (ran.exit_code, ran.err) == (0, "")
    [config] = served
    assert config.server.port == 8123
    assert config.server.drain_timeout == 0.25
    assert config.scheduler.max_num_seqs == 4
    assert config.cache.kv_memory == 2**29
    assert config.cache.enable_prefix_caching is False
    assert config.worker.executor == "sim"


def test_without_flags_the_config_is_the_default(run_cli: Callable[..., Ran], served: list[Config]) -> None:
    assert run_cli("serve").exit_code == 0
    assert served == [Config()]


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "--port", "99999"],
        ["serve", "--port", "http"],
        ["serve", "--kv-memory", "lots"],
        ["serve", "--kv-cache-dtype", "u3"],
        ["serve", "--config", "/nonexistent/c.toml"],
        ["serve", "--model", "damaged.gguf"],
        ["model", "pull", "no-such-model"],
        ["model", "path", "no-such-model"],
        ["model", "list", "--json", "/nonexistent/models.json"],
        ["bench", "offline", "--only", "3"],
    ],
)
def test_an_operators_mistake_is_one_line_and_exit_code_2(
    run_cli: Callable[..., Ran], served: list[Config], arguments: list[str]
) -> None:
    ran = run_cli(*arguments)
    assert ran.exit_code == 2
    assert ran.err.startswith("tidegate: ") and ran.err.count("\n") == 1
    assert ran.out == ""


@pytest.mark.parametrize("arguments", [["chat"], ["explain", "some-id"]])
def test_no_server_is_one_line_with_what_to_do(run_cli: Callable[..., Ran], arguments: list[str]) -> None:
    ran = run_cli(*arguments, "--url", "http://127.0.0.1:9")
    assert ran.exit_code == 1
    assert ran.err == "tidegate: no server at http://127.0.0.1:9; start one with: tidegate serve\n"


@pytest.mark.parametrize("url", ["nonsense", "ftp://127.0.0.1", "http://", "http://127.0.0.1:port"])
def test_what_is_no_address_is_said_so(run_cli: Callable[..., Ran], url: str) -> None:
    ran = run_cli("chat", "--url", url)
    assert ran.exit_code == 1
    assert "is not an address" in ran.err and ran.err.count("\n") == 1


def test_the_catalog_as_json(run_cli: Callable[..., Ran], tmp_path: Path) -> None:
    printed = json.loads(run_cli("model", "list", "--json", "-").out)
    assert Config().model.model in [model["name"] for model in printed]
    assert run_cli("model", "list", "--json", str(tmp_path / "models.json")).out == ""
    assert json.loads((tmp_path / "models.json").read_text(encoding="utf-8")) == printed


def test_the_catalog_as_a_table(run_cli: Callable[..., Ran]) -> None:
    assert Config().model.model in run_cli("model", "list").out


def test_help_imports_nothing_heavy() -> None:
    heavy = [
        "openvino",
        "openvino_genai",
        "numpy",
        "tokenizers",
        "fastapi",
        "uvicorn",
        "zmq",
        "httpx",
        "jinja2",
        "gguf",
    ]
    script = f"import sys, tidegate.cli; print([name for name in {heavy} if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"
