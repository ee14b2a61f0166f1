"""WorkerSpec: all that a worker process is told at its start, as one line of JSON on its standard input.

Not on its command line, where every user of the machine could read it. The pipe stays open: its end is the frontend's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from tidegate.config import Config
from tidegate.models.source import ModelSource


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """`address` is a WorkerLink's. `config_json` is the frontend's Config; what only the server reads comes along."""

    worker_id: str
    incarnation: str
    address: str
    parent_pid: int
    config_json: str
    model: ModelSource

    @property
    def config(self) -> Config:
        return Config.model_validate_json(self.config_json)

    def encode(self) -> bytes:
        return msgspec.json.encode(self, enc_hook=_encode_path) + b"\n"

    @classmethod
    def decode(cls, line: bytes) -> WorkerSpec:
        return msgspec.json.decode(line, type=cls, dec_hook=_decode_path)


def _encode_path(value: Any) -> str:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} has no place in a WorkerSpec")


def _decode_path(kind: type, value: Any) -> Any:
    return kind(value)
