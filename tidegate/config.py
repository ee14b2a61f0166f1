"""Configuration: one frozen model per component, nested in Config, from a TOML file and flags.

Every field is a flag of `tidegate serve` (`--max-num-seqs` sets scheduler.max_num_seqs), unless it is marked
`json_schema_extra={"flag": False}`, and a key of its component's table in the TOML file. Flags win over the file. An
unknown key, a wrong type or a value out of range is one ConfigError that names it. Nothing changes a
Config after start.
"""

from __future__ import annotations

import difflib
import ipaddress
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
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


def parse_networks(value: object) -> object:
    """'10.0.0.1, 10.1.0.0/16' or a list of them, to networks as text. Raises ValueError."""
    parts = [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value
    if not isinstance(parts, list | tuple):
        return value
    return tuple(str(ipaddress.ip_network(str(part), strict=False)) for part in parts)


Size = Annotated[int, BeforeValidator(parse_size)]
Duration = Annotated[float, BeforeValidator(parse_duration)]
Networks = Annotated[tuple[str, ...], BeforeValidator(parse_networks)]
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
    tenant_header: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9-]+$",
        description="Header that names the tenant, believed from --trusted-proxies only; default: keys name it.",
    )
    trusted_proxies: Networks = Field(
        (), description="Addresses or networks, with commas between, whose --tenant-header is believed; default: none."
    )
    admin_key: str | None = Field(
        None, description="The operator's key, with which /metrics has tenant labels; default: none."
    )
    usage_file: str | None = Field(
        None, description="SQLite file that usage per tenant is kept in; default: usage is not kept."
    )
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
    long_output: int = Field(
        512, ge=1, description="Tokens produced from which on an answer counts as long and can be paused for others."
    )
    max_long_decode_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Share of the slots that long answers may hold while others of their tier or above wait for one; "
        "1 pauses none.",
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
    order: Literal["auto", "deadline", "shortest-prefill", "fifo", "fair"] = Field(
        "auto",
        description="Who is served first among the waiting requests of a tier; auto: fair between the tenants where "
        "there are any, else deadline.",
    )
    fair_slots: Literal["preempt", "reserve", "turns"] = Field(
        "preempt",
        description="How a tenant within its share gets a slot of one beyond it (order fair): the newest request there "
        "gives way (preempt), a tenth of the slots is kept from it (reserve), or when one ends (turns).",
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
DEFAULT_TIER = "default"


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


_KEY_HASH = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)


class TenantConfig(_Component):
    """Who may use the server, and how much of it. A limit of None is no limit; quotas are of this server alone.

    Tokens are those of prompt and answer. `cache_group`: tenants of one group share their prefix cache; without one a
    tenant has it to itself. `tiers`: the service tiers it may ask for; None is all of them.
    """

    keys: tuple[str, ...] = Field((), description="sha256:HEX of each key; `tidegate tenant new-key` makes one.")
    weight: float = Field(1.0, gt=0, le=1e6, description="Share of the machine, relative to the other tenants'.")
    tiers: tuple[str, ...] | None = Field(None, min_length=1, description="Service tiers it may ask for.")
    default_tier: str | None = Field(
        None, description="Tier of a request that names none; default: `default`, or its first where that is not its."
    )
    requests_per_minute: int | None = Field(None, ge=1, description="Requests a minute.")
    tokens_per_minute: int | None = Field(None, ge=1, description="Tokens a minute.")
    tokens_per_day: int | None = Field(None, ge=1, description="Tokens a day (UTC).")
    tokens_per_month: int | None = Field(None, ge=1, description="Tokens a month (UTC).")
    tier_tokens_per_minute: dict[str, Annotated[int, Field(ge=0)]] = Field(
        default_factory=dict, description="Tokens a minute by tier; beyond them a request is served as `default`."
    )
    max_concurrent: int | None = Field(None, ge=1, description="Requests at once, waiting ones among them.")
    max_kv_share: float | None = Field(None, gt=0, le=1, description="Share of a worker's KV blocks it may hold.")
    max_prompt_tokens: int | None = Field(None, ge=1, description="Longest prompt.")
    max_output_tokens: int | None = Field(None, ge=1, description="Longest answer; longer ones are cut to it.")
    cache_group: str | None = Field(None, min_length=1, description="Tenants that share one prefix cache.")

    @field_validator("keys")
    @classmethod
    def _keys_are_hashes(cls, keys: tuple[str, ...]) -> tuple[str, ...]:
        for key in keys:
            if _KEY_HASH.fullmatch(key) is None:
                raise ValueError("a key is given as sha256:HEX (64 digits); `tidegate tenant new-key` writes one")
        return keys

    @property
    def fallback_tier(self) -> str:
        """Served to a request that names no tier."""
        if self.default_tier is not None:
            return self.default_tier
        return DEFAULT_TIER if self.tiers is None or DEFAULT_TIER in self.tiers else self.tiers[0]


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
    tenants: dict[str, TenantConfig] = Field(default_factory=dict)
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

    @field_validator("tenants")
    @classmethod
    def _tenants_fit_together(cls, tenants: dict[str, TenantConfig], info: ValidationInfo) -> dict[str, TenantConfig]:
        owner: dict[str, str] = {}
        tiers = info.data.get("tiers", {})
        server = info.data.get("server", ServerConfig())
        if tenants and server.api_key is not None:
            raise ValueError("with tenants, keys are theirs; server.api_key (--api-key) must not be set")
        if server.tenant_header is not None and not server.trusted_proxies:
            raise ValueError("server.tenant_header is believed from server.trusted_proxies only, and there are none")
        for name, tenant in tenants.items():
            if re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name, re.ASCII) is None:
                raise ValueError(f"{name[:80]!r} is no tenant's name; use up to 64 letters, digits and _ . -")
            asked = [*(tenant.tiers or ()), *tenant.tier_tokens_per_minute]
            for tier in [*asked, *([tenant.default_tier] if tenant.default_tier is not None else [])]:
                if tier not in tiers:
                    raise ValueError(f"tenants.{name} names tier {tier!r}; known: {', '.join(tiers)}")
            if tenant.tiers is not None and tenant.fallback_tier not in tenant.tiers:
                raise ValueError(
                    f"tenants.{name}.default_tier is {tenant.fallback_tier!r}, which is not one of its tiers: "
                    f"{', '.join(tenant.tiers)}"
                )
            for key in tenant.keys:
                if (other := owner.setdefault(key, name)) != name:
                    raise ValueError(f"tenants {other} and {name} have a key in common; a key names one tenant")
        return tenants


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
    if value is None or value == ():
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
        if path[0] in ("tiers", "tenants"):
            parent = TierConfig if path[0] == "tiers" else TenantConfig
        return f"unknown config key '{where}'; {_did_you_mean(path[-1], sorted(parent.model_fields))}"
    message = first["msg"].removeprefix("Value error, ")
    flag = f" ({flag_name(path[-1])})" if len(path) == 2 else ""
    # Keys are secrets, and a whole table says nothing.
    tells = not isinstance(first["input"], dict) and not {"keys", "api_key", "admin_key"} & set(path)
    return f"config key '{where}'{flag}: {message}" + (f", not {first['input']!r}" if tells else "")


def _did_you_mean(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean '{close[0]}'?" if close else f"known here: {', '.join(known)}"
