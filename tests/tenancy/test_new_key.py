"""`tidegate tenant new-key`: the key works, and the rest of the file is as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tidegate.cli import app
from tidegate.config import ConfigError, load_config
from tidegate.tenancy.tenants import TenantRegistry
from tidegate.terminal.tenant import new_key

TEXT = """# ours
[server]
port = 8001   # not 8000

[tenants.acme]  # first
weight = 3
keys = [  # many
]

[tenants."a.b"]
weight = 2
[tiers.gold]
rank = 0
"""


def owner_of(file: Path, key: str) -> str:
    tenant = TenantRegistry(load_config(file).tenants).by_key(key.encode())
    assert tenant is not None
    return tenant.name


@pytest.mark.parametrize("name", ["acme", "a.b", "brand-new", "x.y"])
def test_the_key_is_the_tenants_and_every_line_is_still_there(tmp_path: Path, name: str) -> None:
    file = tmp_path / "t.toml"
    file.write_text(TEXT)
    keys = [new_key(name, file) for _ in range(3)]
    assert [owner_of(file, key) for key in keys] == [name] * 3
    text = file.read_text()
    assert not any(key in text for key in keys)
    for line in TEXT.splitlines():
        assert line.split("[  #")[0] in text
    config = load_config(file)
    assert config.tenants["acme"].weight == 3
    assert config.tiers["gold"].rank == 0
    assert [path.name for path in tmp_path.iterdir()] == ["t.toml"]


def test_a_file_that_is_not_there_is_made(tmp_path: Path) -> None:
    file = tmp_path / "t.toml"
    result = CliRunner().invoke(app, ["tenant", "new-key", "acme", "--config", str(file)])
    assert result.exit_code == 0
    assert owner_of(file, result.stdout.strip()) == "acme"


def test_a_wrong_file_or_name_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "t.toml"
    for text, name in (("[tenants.a]\nweight = -1\n", "a"), ("[server]\n", "no such name"), ("[tenants]\na={}\n", "a")):
        file.write_text(text)
        with pytest.raises(ConfigError):
            new_key(name, file)
        assert file.read_text() == text
    assert [path.name for path in tmp_path.iterdir()] == ["t.toml"]
