"""Reads request traces as they are published: times and lengths, and which prefix blocks requests share. No text.

Mooncake (FAST 2025): JSON lines with `timestamp` (ms), `input_length`, `output_length` and `hash_ids`, one id for each
512 prompt tokens, the last one for what is left; equal ids are equal blocks with equal blocks before them. `tier` and
`tenant` are read where they are there. Azure (2023): CSV with `TIMESTAMP` (UTC, 7 fractional digits), `ContextTokens`,
`GeneratedTokens`. Gzipped or not; which one it is shows in the content.

Owns: the formats and what can be wrong with a line. Never does: change times or lengths (trace.py).
"""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Literal

import msgspec

from tidegate.config import ConfigError

MOONCAKE_BLOCK_TOKENS = 512
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_MAX_TOKENS = 1 << 24
_GZIP_MAGIC = b"\x1f\x8b"
_MAX_BAD_LISTED = 5

TraceFormat = Literal["mooncake", "azure"]


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """A request: seconds from the first one, tokens, and the ids of its prompt's blocks (none where unknown)."""

    time_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    block_ids: tuple[int, ...] = ()
    tier: str = ""
    tenant: str = ""


@dataclass
class Trace:
    """`num_bad` lines were left out; `bad_lines` tells of the first few."""

    name: str
    format: TraceFormat
    entries: list[TraceEntry] = field(default_factory=list)
    num_bad: int = 0
    bad_lines: list[str] = field(default_factory=list)


class _BadLine(ValueError):
    """What is wrong with a line."""


class _MooncakeLine(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()
    tier: str = ""
    tenant: str = ""


def read_trace(path: Path, *, skip_bad: bool = False) -> Trace:
    """Raises ConfigError with the line number and what is wrong, for the first bad line unless those are skipped."""
    text = _text_of(path)
    lines = io.StringIO(text)
    first = lines.readline().strip()
    name = path.name.removesuffix(".gz").rpartition(".")[0] or path.name
    if first.startswith("{"):
        lines.seek(0)
        trace = Trace(name, "mooncake")
        source, parse = enumerate(lines, start=1), _parse_mooncake
    elif tuple(column.strip() for column in first.split(",")) == _AZURE_COLUMNS:
        trace = Trace(name, "azure")
        source, parse = enumerate(lines, start=2), _parse_azure
    else:
        raise ConfigError(
            f"{path}, line 1: neither a JSON object (Mooncake) nor the header {','.join(_AZURE_COLUMNS)} (Azure)"
        )
    _read_lines(trace, path, source, parse, skip_bad)
    if not trace.entries:
        raise ConfigError(f"{path} holds no request")
    start_s = trace.entries[0].time_s
    trace.entries = [replace(entry, time_s=entry.time_s - start_s) for entry in trace.entries]
    return trace


def _text_of(path: Path) -> str:
    try:
        data = path.read_bytes()
        if data.startswith(_GZIP_MAGIC):
            data = gzip.decompress(data)
        return data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}, line {data.count(10, 0, error.start) + 1}: not UTF-8 text") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(f"{path} is not a whole gzip file: {error}") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None


def _read_lines(
    trace: Trace,
    path: Path,
    lines: Iterator[tuple[int, str]],
    parse: Callable[[str], TraceEntry],
    skip_bad: bool,
) -> None:
    last_s = float("-inf")
    for number, line in lines:
        if not line.strip():
            continue
        try:
            entry = parse(line)
            if entry.time_s < last_s:
                raise _BadLine(f"its time is {last_s - entry.time_s:.6g} s before that of a line above")
        except _BadLine as error:
            what = f"line {number}: {error}"
            if not skip_bad:
                raise ConfigError(f"{path}, {what} (--skip-bad leaves such lines out)") from None
            trace.num_bad += 1
            if len(trace.bad_lines) < _MAX_BAD_LISTED:
                trace.bad_lines.append(what)
            continue
        last_s = entry.time_s
        trace.entries.append(entry)


def _parse_mooncake(line: str) -> TraceEntry:
    try:
        entry = msgspec.json.decode(line, type=_MooncakeLine)
    except msgspec.ValidationError as error:
        raise _BadLine(str(error)) from None
    except (msgspec.MsgspecError, UnicodeError):
        raise _BadLine("not a JSON object") from None
    num_prompt_tokens = _length("input_length", entry.input_length)
    num_blocks = -(-num_prompt_tokens // MOONCAKE_BLOCK_TOKENS)
    if entry.hash_ids and len(entry.hash_ids) != num_blocks:
        raise _BadLine(f"{len(entry.hash_ids)} hash_ids for {num_prompt_tokens} tokens, which are {num_blocks} blocks")
    return TraceEntry(
        entry.timestamp / 1e3,
        num_prompt_tokens,
        _length("output_length", entry.output_length),
        entry.hash_ids,
        entry.tier,
        entry.tenant,
    )


def _parse_azure(line: str) -> TraceEntry:
    cells = next(csv.reader([line]))
    if len(cells) != len(_AZURE_COLUMNS):
        raise _BadLine(f"{len(cells)} columns, not {len(_AZURE_COLUMNS)}")
    prompt, output = (_azure_length(name, cell) for name, cell in zip(_AZURE_COLUMNS[1:], cells[1:], strict=True))
    return TraceEntry(_azure_time_s(cells[0]), prompt, output)


def _azure_time_s(text: str) -> float:
    """'2023-11-16 18:15:46.6805900': the standard library reads six fractional digits, and here there are seven."""
    whole, _, fraction = text.strip().partition(".")
    try:
        seconds = datetime.fromisoformat(whole + "+00:00").timestamp()
        return seconds + (int(fraction) / 10 ** len(fraction) if fraction else 0.0)
    except ValueError:
        raise _BadLine(f"TIMESTAMP {text!r} is not a time like 2023-11-16 18:15:46.6805900") from None


def _azure_length(name: str, cell: str) -> int:
    try:
        return _length(name, int(cell))
    except _BadLine:
        raise
    except ValueError:
        raise _BadLine(f"{name} {cell.strip()!r} is not a number of tokens") from None


def _length(name: str, num_tokens: int) -> int:
    if not 1 <= num_tokens <= _MAX_TOKENS:
        raise _BadLine(f"{name} is {num_tokens}; it must be from 1 to {_MAX_TOKENS}")
    return num_tokens
