"""Config: file and flags merge over the defaults, and every mistake is one line that names it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from pydantic import ValidationError

from tidegate.config import Config, ConfigError, flag_component, flags, load_config, parse_duration, parse_size


def write_toml(folder: Path, text: str) -> Path:
    path = folder / "tidegate.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_flags_win_over_the_file_and_the_file_over_the_defaults(tmp_path: Path) -> None:
    path = write_toml(tmp_path, '[server]\nport = 9000\nhost = "0.0.0.0"\n[cache]\nkv_memory = "512MiB"\n')
    config = load_config(path, {"port": "9001", "max_num_seqs": None})
    assert (config.server.port, config.server.host) == (9001, "0.0.0.0")
    assert config.cache.kv_memory == 512 * 2**20
    assert config.scheduler.max_num_seqs == Config().scheduler.max_num_seqs


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[server]\nprot = 1", ["server.prot", "did you mean 'port'"]),
        ("[srver]\nport = 1", ["srver", "did you mean 'server'"]),
        ("[server]\nzzzzzz = 1", ["server.zzzzzz", "known here", "drain_timeout"]),
        ("port = 1", ["port", "known here"]),
        ("server = 1", ["server"]),
        ('[server]\nport = "a lot"', ["server.port", "--port", "'a lot'"]),
        ("[server]\nport = 65536", ["server.port", "65535"]),
        ("[server]\ndrain_timeout = nan", ["server.drain_timeout"]),
        ("[server]\ndrain_timeout = inf", ["server.drain_timeout"]),
        ('[cache]\nkv_memory = "1 banana"', ["cache.kv_memory", "1GiB"]),
        ('[cache]\nkv_cache_dtype = "u3"', ["cache.kv_cache_dtype", "'u8'"]),
        ("[server", ["not valid TOML"]),
    ],
)
def test_a_mistake_in_the_file_is_one_line_that_names_it(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write_toml(tmp_path, text))
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_a_setting_that_is_none_is_named() -> None:
    with pytest.raises(ConfigError, match="unknown setting 'kv_memroy'; did you mean 'kv_memory'"):
        load_config(None, {"kv_memroy": "1GiB"})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read config file .*absent\.toml"):
        load_config(tmp_path / "absent.toml")


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("1GiB", 2**30), ("1.5 GiB", 3 * 2**29), ("2e9", 2 * 10**9), ("10kb", 10_000), ("7", 7), (" 7 B ", 7)],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize(
    ("text", "seconds"), [("250ms", 0.25), ("2s", 2.0), ("1.5min", 90.0), ("2m", 120.0), ("1h", 3600.0), ("3", 3.0)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "GiB", "1.2.3GiB", "-1GiB", "1 GiB more", "nan", "inf", "1,5GiB", "٣GiB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_size(text)


@pytest.mark.parametrize("text", ["", "s", "1.2.3s", "-1s", "2 seconds", "1d", "nan", "2S"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a duration"):
        parse_duration(text)


def test_each_flag_belongs_to_one_component() -> None:
    names = Counter(flag.name for flag in flags())
    assert [name for name, times in names.items() if times > 1] == []
    assert all(flag_component(flag.name) == flag.component for flag in flags())


def test_each_flag_says_what_it_is_for_and_its_default() -> None:
    for flag in flags():
        assert flag.description.endswith("."), flag.name
        assert flag.default or "default" in flag.description, flag.name


def test_a_printed_default_reads_back_as_the_default() -> None:
    given = {flag.name: flag.default for flag in flags() if flag.default}
    assert load_config(None, given) == Config()


def test_nothing_changes_a_config() -> None:
    with pytest.raises(ValidationError):
        Config().server.port = 1  # type: ignore[misc]
