"""Traces: both formats, gzipped or not, what is wrong with a bad line, and what becomes of the requests."""

from __future__ import annotations

import gzip
from collections import Counter
from pathlib import Path

import pytest

from tidegate.bench.content import token_ids
from tidegate.bench.trace import TraceOptions, load_trace, parse_options, trace_items, trace_workload
from tidegate.bench.trace_file import read_trace
from tidegate.bench.workload import WorkItem
from tidegate.config import ConfigError

DATA = Path(__file__).parent / "data"
AZURE = DATA / "azure_conv_sample.csv"
MOONCAKE = DATA / "mooncake_conversation_sample.jsonl"


def items_of(path: Path, options: TraceOptions | None = None, **changes: str | int) -> list[WorkItem]:
    options = options or TraceOptions()
    return trace_items(load_trace(str(path), options), options, 7, **changes)


def written(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(line + "\n" for line in lines))
    return path


def entry(timestamp: int, *, prompt: int = 600, output: int = 5, ids: str = "[1, 2]") -> str:
    return f'{{"timestamp": {timestamp}, "input_length": {prompt}, "output_length": {output}, "hash_ids": {ids}}}'


def test_azure_times_are_read_to_the_seventh_digit_and_count_from_the_first():
    entries = read_trace(AZURE).entries
    assert len(entries) == 12
    assert entries[0].time_s == 0.0
    assert entries[1].time_s == pytest.approx(4.314579, abs=1e-6)
    assert (entries[0].num_prompt_tokens, entries[0].num_output_tokens) == (374, 44)


@pytest.mark.parametrize("source", [AZURE, MOONCAKE])
def test_gzipped_is_the_same(tmp_path: Path, source: Path):
    packed = tmp_path / f"{source.name}.gz"
    packed.write_bytes(gzip.compress(source.read_bytes()))
    assert read_trace(packed).entries == read_trace(source).entries
    assert read_trace(packed).name == read_trace(source).name


def test_equal_block_ids_are_equal_tokens_and_others_are_not():
    one, other, *_ = items_of(MOONCAKE)
    first, second = token_ids(one.content), token_ids(other.content)
    assert len(first) == one.num_prompt_tokens == 2290
    assert first[:512] == second[:512]
    assert first[512:560] != second[512:560]


def test_another_content_seed_is_the_same_work_in_other_words():
    one, other = items_of(MOONCAKE), items_of(MOONCAKE, content_seed="again")
    assert [item.arrival_s for item in one] == [item.arrival_s for item in other]
    assert not {s.key for item in one for s in item.content} & {s.key for item in other for s in item.content}


def test_requests_on_a_coarse_clock_are_spread_over_its_tick():
    read = read_trace(MOONCAKE).entries
    items = items_of(MOONCAKE)
    assert len({one.time_s for one in read}) < len(read) / 2
    times = [item.arrival_s for item in items]
    assert len(set(times)) == len(times) and times == sorted(times)
    for one, item in zip(read, items, strict=True):
        assert one.time_s <= item.arrival_s <= one.time_s + 3.0


def test_times_on_a_fine_clock_are_kept():
    assert [item.arrival_s for item in items_of(AZURE)] == [one.time_s for one in read_trace(AZURE).entries]


def test_times_and_lengths_scale_and_prefixes_stay_shared():
    plain = items_of(MOONCAKE)
    scaled = items_of(MOONCAKE, TraceOptions(scale_time=2.0, scale_length=0.25))
    assert [item.arrival_s for item in scaled] == [2.0 * item.arrival_s for item in plain]
    assert scaled[0].num_prompt_tokens == round(2290 / 4)
    first, second = token_ids(scaled[0].content), token_ids(scaled[1].content)
    assert first[:128] == second[:128] and first[128:140] != second[128:140]


def test_a_window_is_cut_out_and_starts_at_zero():
    options = parse_options(1.0, 1.0, "3s:9s", None, False)
    items = items_of(MOONCAKE, options)
    assert 0 < len(items) < 16
    assert all(0.0 <= item.arrival_s <= 9.0 for item in items)
    with pytest.raises(ConfigError, match=r"no request .* lies in the window"):
        load_trace(str(MOONCAKE), parse_options(1.0, 1.0, "2h:", None, False))


def test_tenants_are_assigned_by_zipfs_law(tmp_path: Path):
    path = written(tmp_path, *(entry(i) for i in range(2_000)))
    counts = Counter(item.tenant for item in items_of(path, parse_options(1.0, 1.0, None, "zipf:4", False)))
    assert set(counts) == {"tenant-1", "tenant-2", "tenant-3", "tenant-4"}
    assert counts["tenant-1"] / counts["tenant-2"] == pytest.approx(2.0, rel=0.2)


@pytest.mark.parametrize(
    ("bad", "what"),
    [
        ("{", "line 2: not a JSON object"),
        ('{"timestamp": 1}', "line 2: .*missing required field `input_length`"),
        (entry(5, prompt=-3, ids="[]"), "line 2: input_length is -3; it must be from 1"),
        (entry(5, output=0), "line 2: output_length is 0"),
        (entry(5, ids="[1]"), "line 2: 1 hash_ids for 600 tokens, which are 2 blocks"),
        (entry(-1_000), "line 2: its time is 1 s before that of a line above"),
    ],
)
def test_a_bad_line_is_told_with_its_number_or_left_out_and_counted(tmp_path: Path, bad: str, what: str):
    path = written(tmp_path, entry(0), bad, entry(10))
    with pytest.raises(ConfigError, match=what):
        read_trace(path)
    trace = read_trace(path, skip_bad=True)
    assert (len(trace.entries), trace.num_bad) == (2, 1)
    assert trace.bad_lines[0].startswith("line 2: ")


@pytest.mark.parametrize(
    ("cells", "what"),
    [
        ("2023-11-16 18:15:46.6805900,374", "2 columns, not 3"),
        ("yesterday,374,44", "TIMESTAMP 'yesterday' is not a time"),
        ("2023-11-16 18:15:46.6805900,many,44", "ContextTokens 'many' is not a number"),
        ("2023-11-16 18:15:46.6805900,374,-44", "GeneratedTokens is -44"),
    ],
)
def test_a_bad_azure_line_is_told(tmp_path: Path, cells: str, what: str):
    path = tmp_path / "trace.csv"
    path.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{cells}\n")
    with pytest.raises(ConfigError, match=f"line 2: {what}"):
        read_trace(path)


@pytest.mark.parametrize("content", [b"hello\n", b"", b"\x1f\x8b123", b"\xff\xfe\x00"])
def test_a_file_that_is_no_trace_is_one_clear_line(tmp_path: Path, content: bytes):
    path = tmp_path / "trace"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="trace"):
        read_trace(path)


@pytest.mark.parametrize("text", ["60s", "9s:3s", "a:b", "-1s:4s"])
def test_a_bad_window_is_told(text: str):
    with pytest.raises(ConfigError, match="--window takes two times"):
        parse_options(1.0, 1.0, text, None, False)


@pytest.mark.parametrize("text", ["uniform", "zipf:0", "zipf:x", "zipf:3:1:2"])
def test_a_bad_assignment_of_tenants_is_told(text: str):
    with pytest.raises(ConfigError, match="--assign-tenants takes zipf"):
        parse_options(1.0, 1.0, None, text, False)


def test_the_workload_that_stands_for_a_trace_has_its_classes_and_tenants():
    items = items_of(MOONCAKE, parse_options(1.0, 1.0, None, "zipf:3", False))
    workload = trace_workload("sample", items)
    assert [one.name for one in workload.classes] == ["short", "medium"]
    assert sum(one.share for one in workload.classes) == 16
    assert {one.name for one in workload.tenants} <= {"tenant-1", "tenant-2", "tenant-3"}
