"""Usage on disk: a killed process loses a second at most, nothing is counted twice, and the report adds up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tidegate.cli import app
from tidegate.config import ConfigError
from tidegate.usage.report import parse_since, usage_rows
from tidegate.usage.store import HOUR_S, UsageStore, read_usage

NOON = 1_700_000_000 // HOUR_S * HOUR_S


def store(path: Path) -> UsageStore:
    return UsageStore(path, unix_time=lambda: NOON)


def test_sums_go_on_after_a_restart_and_each_is_counted_once(tmp_path: Path) -> None:
    file = tmp_path / "usage.db"
    for amount in (5, 7):
        one = store(file)
        one.add("acme", "default", "output_tokens", amount)
        one.flush()
        one.flush()
        one.close()
    assert read_usage(file, 0) == {(NOON // HOUR_S, "acme", "default", "output_tokens"): 12}


def test_what_cannot_be_written_is_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "usage.db"
    one = store(file)
    one.add("acme", "default", "prompt_tokens", 3)
    one._database.execute("ALTER TABLE usage RENAME TO away")
    one.flush()
    one._database.execute("ALTER TABLE away RENAME TO usage")
    one.add("acme", "default", "prompt_tokens", 4)
    one.close()
    assert sum(read_usage(file, 0).values()) == 7


def test_tokens_since_are_those_of_prompts_and_answers(tmp_path: Path) -> None:
    one = store(tmp_path / "usage.db")
    for measure, amount in (("prompt_tokens", 10), ("output_tokens", 5), ("cached_tokens", 8), ("requests:stop", 1)):
        one.add("a", "default", measure, amount)
    one.add("b", "default", "output_tokens", 100)
    one.flush()
    assert one.tokens_since("a", NOON) == 15
    assert one.tokens_since("a", NOON + HOUR_S) == 0
    one.close()


KILLED = """
import sys
from pathlib import Path
from tidegate.usage.store import UsageStore
one = UsageStore(Path(sys.argv[1]))
for i in range(1000):
    one.add("acme", "default", "output_tokens")
    if i % 100 == 99:
        one.flush()
        print(i + 1, flush=True)
one.add("acme", "default", "output_tokens", 50)
print("last", flush=True)
sys.stdin.read()
"""


def test_a_killed_process_leaves_what_was_written_and_no_more_than_was_used(tmp_path: Path) -> None:
    file = tmp_path / "usage.db"
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        lines = [line for line in iter(child.stdout.readline, "last\n")]
        os.kill(child.pid, signal.SIGKILL)
    assert lines[-1] == "1000\n"
    assert 1000 <= sum(read_usage(file, 0).values()) <= 1050
    again = UsageStore(file)
    again.add("acme", "default", "output_tokens")
    again.close()
    assert 1001 <= sum(read_usage(file, 0).values()) <= 1051


def test_the_report_groups_and_splits(tmp_path: Path) -> None:
    file = tmp_path / "usage.db"
    one = store(file)
    one.add("a", "default", "requests:stop", 2)
    one.add("a", "flex", "requests:length", 1)
    one.add("a", "flex", "output_tokens", 40)
    one.add("b", "default", "refusals:max_concurrent", 3)
    one.close()
    rows = {row["tenant"]: row for row in usage_rows(read_usage(file, 0), ["tenant"])}
    assert (rows["a"]["requests"], rows["a"]["requests:stop"], rows["a"]["output_tokens"]) == (3, 2, 40)
    assert (rows["b"]["requests"], rows["b"]["refusals"], rows["b"]["refusals:max_concurrent"]) == (0, 3, 3)
    runner = CliRunner()
    out = runner.invoke(app, ["usage", "--file", str(file), "--by", "tenant,tier", "--json", "-"]).stdout
    assert [(row["tenant"], row["tier"]) for row in json.loads(out)] == [
        ("a", "default"),
        ("a", "flex"),
        ("b", "default"),
    ]
    assert runner.invoke(app, ["usage", "--file", str(file), "--csv"]).stdout.startswith("tenant,tier,requests,")
    assert "max_concurrent" in runner.invoke(app, ["usage", "--file", str(file)]).stdout
    assert usage_rows(read_usage(file, NOON + HOUR_S), ["tenant"]) == []


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no usage file"):
        read_usage(tmp_path / "none.db", 0)
    with pytest.raises(ConfigError, match="--since"):
        parse_since("yesterday")
    with pytest.raises(ConfigError, match="--by"):
        usage_rows(read_usage_of_nothing(tmp_path), ["planet"])
    assert parse_since("2024-05-01") == 1_714_521_600


def read_usage_of_nothing(tmp_path: Path):  # type: ignore[no-untyped-def]
    store(tmp_path / "empty.db").close()
    return read_usage(tmp_path / "empty.db", 0)
