"""Configuration: one frozen model per component, nested in Config, from a TOML file and flags.

Every field is a flag of `tidegate serve` (`--max-num-seqs` sets scheduler.max_num_seqs), unless it is marked
`json_schema_extra={"flag": False}`, and a key of its component's table in the TOML file. Flags win over the file. An
unknown key, a wrong type or a value out of range is one ConfigError that names it. Nothing changes a
Config after start.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator
from pydantic.fields import FieldInfo


class ConfigError(ValueError):
    """A start-up mistake of the operator: one clear line that says what to do. The command exits with code 2."""


_SIZE_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_DURATION_UNITS = {"": 1.0, "ms": 1e-3, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0}


def parse_size(value: object) -> object:
    """'1GiB', '512 MiB', '2e9' or a number of bytes, to bytes. Raises ValueError."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?(?:e\d+)?)\s*([A-Za-z]*)\s*", value, re.ASCII)
    if match is None or match[2].upper() not in _SIZE_UNITS:
        raise ValueError(f"{value!r} is not a size; write it like 1GiB or 512MiB")
    return int(float(match[1]) * _SIZE_UNITS[match[2].upper()])


def parse_duration(value: object) -> object:
    """'250ms', '2s', '5min' or a number of seconds, to seconds. Raises ValueError."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([A-Za-z]*)\s*", value, re.ASCII)
    if match is None or match[2] not in _DURATION_UNITS:
        raise ValueError(f"{value!r} is not a duration; write it like 2s or 250ms")
    return float(match[1]) * _DURATION_UNITS[match[2]]


Size = Annotated[int, BeforeValidator(parse_size)]
Duration = Annotated[float, BeforeValidator(parse_duration)]
KvCacheDtype = Literal["u8", "bf16", "f32"]


class _Component(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)


class ModelConfig(_Component):
    model: str = Field(
        "smollm2-135m",
        description="Catalog name, GGUF file, folder with an OpenVINO IR and tokenizer, or Hugging Face repo id.",
    )
    served_model_name: str | None = Field(
        None, description="Name that clients use; default: the catalog name or the file's name."
    )
    max_model_len: int | None = Field(
        None,
        ge=2,
        description="Longest prompt plus answer, in tokens; default: the model's, or what the KV memory holds if less.",
    )


class ServerConfig(_Component):
    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="TCP port to listen on; 0 takes a free one.")
    api_key: str | None = Field(None, description="Key that clients must send as a bearer token; default: none.")
    drain_timeout: Duration = Field(
        30.0, ge=0, description="Seconds that running requests get to finish after SIGTERM."
    )
    max_body_size: Size = Field(8 * 2**20, ge=1024, description="Largest accepted request body, in bytes.")
    read_timeout: Duration = Field(
        30.0, gt=0, description="Seconds that a client may take to send a request: its headers, then its body."
    )
    write_timeout: Duration = Field(
        30.0, gt=0, description="Seconds without progress after which a client that does not read is cut off."
    )
    max_connections: int = Field(4096, ge=1, description="Most open client connections; one more is answered 503.")
    stall_timeout: Duration = Field(
        30.0, gt=0, description="Seconds without a step, while there is work, after which /health/ready says 503."
    )


class CacheConfig(_Component):
    kv_memory: Size = Field(2**30, ge=1, description="Memory for the KV cache, in bytes; 1GiB, 512MiB also work.")
    kv_cache_dtype: KvCacheDtype = Field(
        "u8",
        description="KV precision, with the compute precision that goes with it: u8 and bf16 compute in bf16, "
        "f32 is the exact mode (f32 compute).",
    )
    enable_prefix_caching: bool = Field(True, description="Reuse the KV blocks of equal prefixes.")
    eviction: Literal["lru", "lfu", "cost-aware"] = Field(
        "lru", description="Which cached blocks go first when room is needed."
    )
    session_ttl: Duration = Field(
        1800.0,
        gt=0,
        description="Seconds of silence after which what only one conversation (prompt_cache_key, session_id) used "
        "leaves the cache.",
    )


class SchedulerConfig(_Component):
    max_num_seqs: int = Field(16, ge=1, description="Slots: most requests that run in one batch.")
    max_num_batched_tokens: int = Field(512, ge=1, description="Most tokens computed in one step.")
    step: Literal["adaptive", "fixed"] = Field(
        "adaptive",
        description="How much prefill a step takes along: what the running answers' TPOT objectives leave room for, or "
        "always up to the step budget.",
    )


class WorkerConfig(_Component):
    executor: Literal["openvino", "sim"] = Field("openvino", description="What computes the steps.")
    num_threads: int = Field(0, ge=0, description="Compute threads of a worker; 0 takes all cores.")


class GateConfig(_Component):
    max_queued: int = Field(1024, ge=0, description="Most requests waiting at the gate; one more is refused with 429.")
    queue_timeout: Duration = Field(
        600.0, gt=0, description="Seconds a request may wait at the gate before it is refused with 429."
    )
    admission: Literal["on", "observe", "off"] = Field(
        "on",
        description="Whether requests that are predicted to miss their objective are downgraded or refused (on), only "
        "reported (observe), or not looked at (off: the bounds of the queue alone).",
    )
    order: Literal["deadline", "shortest-prefill", "fifo"] = Field(
        "deadline", description="Who is served first among the waiting requests of a tier."
    )
    long_prompt: int = Field(1024, ge=1, description="Prompt tokens from which on a prefill counts as long.")
    max_long_prefills: int = Field(1, ge=1, description="Most long prefills that a worker may have at once.")
    max_long_share: float = Field(
        0.65,
        gt=0,
        le=1,
        description="Share of the prompt tokens that long prompts are held to while requests have to be refused.",
    )


TPOT_SLO_DEFAULT_S = 0.15


class TierConfig(_Component):
    """A service tier: what its requests are promised, and what is done with one whose promise cannot be kept."""

    rank: int = Field(1, ge=0, description="Place among the tiers; lower is served first.")
    ttft_slo: Duration | None = Field(2.0, gt=0, description="Objective for the time to the first token, in seconds.")
    tpot_slo: Duration | None = Field(
        TPOT_SLO_DEFAULT_S, gt=0, description="Objective for the mean time between tokens, in seconds."
    )
    downgrade: tuple[str, ...] = Field(
        (), description="What to try, in this order, before a request is refused: clamp:N, tier:NAME."
    )
    max_queued: int = Field(64, ge=0, description="Most requests of this tier that wait at the gate.")
    age_after: Duration = Field(
        30.0, gt=0, description="Seconds at the gate after which a request is served before the tiers above its own."
    )
    max_prompt_tokens: int | None = Field(None, ge=1, description="Longest prompt served in this tier undowngraded.")
    max_expected_output: int | None = Field(
        None, ge=1, description="Longest expected answer (90th percentile, tokens) served in this tier undowngraded."
    )

    @field_validator("downgrade")
    @classmethod
    def _known_actions(cls, actions: tuple[str, ...]) -> tuple[str, ...]:
        for action in actions:
            kind, _, value = action.partition(":")
            if not ((kind == "clamp" and value.isdigit() and int(value) > 0) or (kind == "tier" and value)):
                raise ValueError(f"{action!r} is no downgrade; write clamp:N (output tokens) or tier:NAME")
        return actions


def _default_tiers() -> dict[str, TierConfig]:
    return {
        "priority": TierConfig(rank=0, ttft_slo=1.0, tpot_slo=0.1),
        "default": TierConfig(rank=1),
        "flex": TierConfig(rank=2, ttft_slo=60.0, tpot_slo=0.5, max_queued=256),
    }


class LogConfig(_Component):
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least level that is logged.")


class Config(_Component):
    model: ModelConfig = Field(default_factory=ModelConfig)
    server: ServerConfig = Field(default_factory=ServerConfig)
    cache: CacheConfig = Field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = Field(default_factory=SchedulerConfig)
    worker: WorkerConfig = Field(default_factory=WorkerConfig)
    gate: GateConfig = Field(default_factory=GateConfig)
    tiers: dict[str, TierConfig] = Field(default_factory=_default_tiers)
    log: LogConfig = Field(default_factory=LogConfig)

    @field_validator("tiers", mode="before")
    @classmethod
    def _keep_the_built_in_tiers(cls, tables: object) -> object:
        """A file that names some keys of `priority`, `default` or `flex` leaves the others as they are."""
        if not isinstance(tables, dict):
            return tables
        merged: dict[str, Any] = {name: tier.model_dump() for name, tier in _default_tiers().items()}
        for name, table in tables.items():
            if isinstance(table, TierConfig):
                merged[name] = table
            elif isinstance(table, dict):
                merged[name] = merged.get(name, {}) | table
            else:
                merged[name] = table
        return merged

    @field_validator("tiers")
    @classmethod
    def _downgrades_lead_somewhere(cls, tiers: dict[str, TierConfig]) -> dict[str, TierConfig]:
        for name, tier in tiers.items():
            for action in tier.downgrade:
                kind, _, target = action.partition(":")
                if kind == "tier" and (target not in tiers or target == name):
                    raise ValueError(f"tiers.{name}.downgrade names tier {target!r}; known: {', '.join(tiers)}")
        return tiers


def load_config(path: Path | None = None, given: dict[str, Any] | None = None) -> Config:
    """Merge a TOML file and given flags (flat names; None is not given) over the defaults. Raises ConfigError."""
    tables: dict[str, Any] = {}
    if path is not None:
        try:
            tables = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read config file {path}: {error.strerror}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"config file {path} is not valid TOML: {error}") from None
    for name, value in (given or {}).items():
        if value is not None:
            try:
                component = flag_component(name)
            except KeyError:
                known = sorted(flag.name for flag in flags())
                raise ConfigError(f"unknown setting '{name}'; {_did_you_mean(name, known)}") from None
            table = tables.setdefault(component, {})
            if not isinstance(table, dict):
                raise ConfigError(f"config key '{component}' must be a table, [{component}]")
            table[name] = value
    try:
        return Config.model_validate(tables)
    except ValidationError as error:
        raise ConfigError(_describe(error)) from None


def flag_component(flag: str) -> str:
    """The component whose field `flag` is. Raises KeyError for a name that is no flag."""
    for component, component_field in Config.model_fields.items():
        component_type = component_field.annotation
        if isinstance(component_type, type) and flag in component_type.model_fields:
            return component
    raise KeyError(flag)


@dataclass(frozen=True)
class Flag:
    """One field as the command line shows it. `value` says what it takes: a unit or a type; `choices` what exactly.

    A switch takes no value: `--x` turns it on, `--no-x` off. `default` is empty where the description says it.
    """

    name: str
    component: str
    description: str
    value: str
    choices: tuple[str, ...]
    default: str
    is_switch: bool


def flags() -> Iterator[Flag]:
    """Every flag, in the order of the components and their fields."""
    for component, component_field in Config.model_fields.items():
        component_type = component_field.annotation
        if not (isinstance(component_type, type) and issubclass(component_type, _Component)):
            continue
        for name, field in component_type.model_fields.items():
            if field.json_schema_extra == {"flag": False}:
                continue
            yield Flag(
                name=name,
                component=component,
                description=field.description or "",
                value=_value_kind(field),
                choices=tuple(map(str, get_args(field.annotation))) if _is_choice(field) else (),
                default=_default_text(field),
                is_switch=field.annotation is bool,
            )


def _parser(field: FieldInfo) -> object:
    return next((meta.func for meta in field.metadata if isinstance(meta, BeforeValidator)), None)


def _is_choice(field: FieldInfo) -> bool:
    return get_origin(field.annotation) is Literal


def _value_kind(field: FieldInfo) -> str:
    if _parser(field) is parse_size:
        return "SIZE"
    if _parser(field) is parse_duration:
        return "DURATION"
    if _is_choice(field):
        return "CHOICE"
    kinds = {field.annotation, *get_args(field.annotation)}
    return "INTEGER" if int in kinds else "NUMBER" if float in kinds else "TEXT"


def _default_text(field: FieldInfo) -> str:
    """The default with its unit, as it could be written; empty when there is none (the description then says more)."""
    value = field.default
    if value is None:
        return ""
    if _parser(field) is parse_size:
        unit = next(unit for unit in ("GiB", "MiB", "KiB", "B") if value % _SIZE_UNITS[unit.upper()] == 0)
        return f"{value // _SIZE_UNITS[unit.upper()]}{unit}"
    if _parser(field) is parse_duration:
        return f"{value:g}s"
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)


def flag_name(field: str) -> str:
    """How a field is spelled on the command line."""
    return "--" + field.replace("_", "-")


def _describe(error: ValidationError) -> str:
    """The first mistake, as one line."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"]]
    where = ".".join(path)
    if first["type"] == "extra_forbidden":
        parent: Any = Config if len(path) == 1 else Config.model_fields[path[0]].annotation
        if path[0] == "tiers":
            parent = TierConfig
        return f"unknown config key '{where}'; {_did_you_mean(path[-1], sorted(parent.model_fields))}"
    message = first["msg"].removeprefix("Value error, ")
    flag = f" ({flag_name(path[-1])})" if len(path) == 2 else ""
    return f"config key '{where}'{flag}: {message}, not {first['input']!r}"


def _did_you_mean(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean '{close[0]}'?" if close else f"known here: {', '.join(known)}"
