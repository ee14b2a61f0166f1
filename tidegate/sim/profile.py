"""Profile: what a machine with a model on it can do, as a TOML file. What the simulator takes in place of hardware.

A step takes base + decode rows + prompt tokens + context tokens, each at its cost (cost_model.py); KV memory is a
number of blocks. `source` says where the figures are from and `kind` whether this machine measured them (`tidegate
calibrate`) or a publication did. Profiles that come along are found by name; a path with a suffix or a slash is a file.
"""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tidegate.config import Config, ConfigError
from tidegate.cost_model import StepCost
from tidegate.executor.base import ExecutorInfo

_FOLDER = Path(__file__).parent / "profiles"


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class KvTable(_Table):
    """`num_blocks` of `block_size` tokens each."""

    dtype: str
    block_size: int = Field(ge=1)
    bytes_per_token: int = Field(ge=1)
    num_blocks: int = Field(ge=1)


class StepTable(_Table):
    """Seconds, as StepCost."""

    base_s: float = Field(gt=0)
    decode_row_s: float = Field(ge=0)
    prefill_token_s: float = Field(gt=0)
    context_token_s: float = Field(ge=0)

    def cost(self) -> StepCost:
        return StepCost(self.base_s, self.decode_row_s, self.prefill_token_s, self.context_token_s)


class LoopTable(_Table):
    """Seconds around a step: the rest of an engine loop's turn, and one way between frontend and worker."""

    loop_s: float = Field(0.0005, ge=0)
    hop_s: float = Field(0.0003, ge=0, le=0.001)


class SchedulerTable(_Table):
    """What this machine is run with, where the configuration does not say."""

    max_num_seqs: int = Field(16, ge=1)
    max_num_batched_tokens: int = Field(512, ge=1)


class GateTable(_Table):
    """As SchedulerTable. What is long for one machine takes another a few steps."""

    long_prompt: int = Field(1024, ge=1)


class Profile(_Table):
    source: str
    kind: Literal["measured", "published"]
    model: str
    max_model_len: int = Field(ge=2)
    vocab_size: int = Field(32_000, ge=2)
    kv: KvTable
    step: StepTable
    loop: LoopTable = LoopTable()
    scheduler: SchedulerTable = SchedulerTable()
    gate: GateTable = GateTable()

    def executor_info(self) -> ExecutorInfo:
        kv = self.kv
        return ExecutorInfo(
            model=self.model,
            weight_digest="0" * 64,
            weight_format="none (sim)",
            kv_cache_dtype=kv.dtype,
            compute_dtype="none (sim)",
            block_size=kv.block_size,
            num_blocks=kv.num_blocks,
            bytes_per_block=kv.block_size * kv.bytes_per_token,
            vocab_size=self.vocab_size,
            max_model_len=min(self.max_model_len, kv.block_size * kv.num_blocks),
        )

    def configure(self, config: Config) -> Config:
        """`config`, with this machine's settings where it has none of its own."""
        scheduler = config.scheduler.model_copy(update=_not_given(config.scheduler, self.scheduler))
        gate = config.gate.model_copy(update=_not_given(config.gate, self.gate))
        return config.model_copy(update={"scheduler": scheduler, "gate": gate})


def _not_given(component: BaseModel, table: BaseModel) -> dict[str, Any]:
    return {name: value for name, value in table.model_dump().items() if name not in component.model_fields_set}


def profile_names() -> list[str]:
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


def load_profile(name: str) -> Profile:
    """By name, or a TOML file. Raises ConfigError."""
    path = _FOLDER / f"{name}.toml"
    if name not in profile_names():
        path = Path(name)
        if not path.is_file():
            known = profile_names()
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}; or give a TOML file"
            raise ConfigError(f"no profile '{name}'; {hint}")
    try:
        return Profile.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"cannot read profile {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"profile {path} is not valid TOML: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"profile {path}: '{where}': {first['msg']}") from None


def to_toml(profile: Profile) -> str:
    """Numbers and plain text only, so that a few lines do."""
    document = profile.model_dump()
    tables = {name: value for name, value in document.items() if isinstance(value, dict)}
    lines = [f"{name} = {_toml_value(value)}" for name, value in document.items() if name not in tables]
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(f"{key} = {_toml_value(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def _toml_value(value: object) -> str:
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        return f'"{escaped}"'
    return repr(value)
