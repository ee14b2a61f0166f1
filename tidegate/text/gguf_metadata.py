"""The key-value section of a GGUF file, read in one pass.

Owns: turning the header into plain Python values. Never reads tensors, and never trusts a length it has not checked
against the file. The `gguf` package gives the same values, but builds several arrays for each of some 100,000 strings
(seconds); this reader takes a tenth of a second, so that a start stays quick.

Layout (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), little-endian, versions 2 and 3:
    magic "GGUF" | version u32 | num_tensors u64 | num_pairs u64 | pairs: key string, type u32, value
    string: length u64, bytes        array: element type u32, length u64, elements
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

from tidegate.config import ConfigError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING = 8
_ARRAY = 9
_MAX_PAIRS = 65_536


def read_gguf_metadata(path: Path) -> dict[str, Any]:
    """All metadata of the file at `path`: numbers, booleans, strings, and lists of these.

    Strings that are not UTF-8 keep their bytes as lone surrogates. Raises ConfigError when it cannot be read.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).pairs()
    except OSError as error:
        raise ConfigError(f"cannot read model file {path}: {error.strerror}") from None
    except (ValueError, struct.error) as error:
        raise ConfigError(f"{path} is not a GGUF file that can be read ({error}); fetch it again") from None


class _Reader:
    """A cursor over the mapped file. Raises ValueError or struct.error on whatever does not fit the format."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._offset = 0

    def pairs(self) -> dict[str, Any]:
        if self._data[:4] != b"GGUF":
            raise ValueError("its first bytes are not 'GGUF'")
        version = struct.unpack_from("<I", self._data, 4)[0]
        if version not in (2, 3):
            raise ValueError(f"version {version} is not 2 or 3")
        num_pairs = struct.unpack_from("<Q", self._data, 16)[0]
        if num_pairs > _MAX_PAIRS:
            raise ValueError(f"{num_pairs} metadata keys")
        self._offset = 24
        metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self._string()
            metadata[key] = self._value(self._scalar("I"))
        return metadata

    def _scalar(self, code: str) -> Any:
        value = struct.unpack_from("<" + code, self._data, self._offset)[0]
        self._offset += struct.calcsize("<" + code)
        return value

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        data, offset, size = self._data, self._offset, len(self._data)
        unpack = struct.Struct("<Q").unpack_from
        strings = []
        for _ in range(count):
            start = offset + 8
            offset = start + unpack(data, offset)[0]
            if offset > size:
                raise ValueError("it is cut short")
            strings.append(data[start:offset].decode("utf-8", "surrogateescape"))
        self._offset = offset
        return strings

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise ValueError(f"unknown value type {kind}")
        return self._scalar(_SCALARS[kind])

    def _array(self) -> list[Any]:
        kind, count = self._scalar("I"), self._scalar("Q")
        if count > len(self._data):
            raise ValueError("it is cut short")
        if kind == _STRING:
            return self._strings(count)
        if kind not in _SCALARS:
            raise ValueError(f"array of type {kind}")
        layout = struct.Struct(f"<{count}{_SCALARS[kind]}")
        values = layout.unpack_from(self._data, self._offset)
        self._offset += layout.size
        return list(values)
