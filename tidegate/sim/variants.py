"""The variants that --compare asks for: every combination of the values given, or one change of the base at a time.

An axis is `batching` (continuous, static), `workers` (numbers), or any setting of `tidegate serve` (order, admission,
eviction, step, max_num_seqs, ...), judged by the same rules as in a configuration file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from tidegate.config import Config, ConfigError, flag_component, load_config
from tidegate.scheduler.static_batching import StaticBatching

_MAX_VARIANTS = 64
_BATCHING = ("continuous", "static")

Setting = tuple[str, str]


@dataclass(frozen=True)
class Variant:
    config: Config
    num_workers: int
    batching: StaticBatching | None = None
    name: str = "simulated"


def variants_of(base: Variant, axes: Sequence[str], *, one_at_a_time: bool = False) -> list[Variant]:
    """`axes` like "order=deadline,fifo". Without any, the base alone. Raises ConfigError."""
    parsed = [_parse_axis(axis) for text in axes for axis in text.split()]
    names = [name for name, _ in parsed]
    if len(set(names)) < len(names):
        raise ConfigError("--compare names a setting twice")
    if not parsed:
        return [base]
    if one_at_a_time:
        combinations: list[list[Setting]] = [[]]
        combinations += [[(name, value)] for name, values in parsed for value in values]
    else:
        combinations = [list(zip(names, values, strict=True)) for values in product(*(values for _, values in parsed))]
    if len(combinations) > _MAX_VARIANTS:
        raise ConfigError(
            f"--compare asks for {len(combinations)} runs, the most is {_MAX_VARIANTS}; --one-at-a-time needs fewer"
        )
    return [_variant(base, settings) for settings in combinations]


def _parse_axis(text: str) -> tuple[str, list[str]]:
    name, equals, values = text.partition("=")
    chosen = [value for value in values.split(",") if value]
    if not equals or not chosen:
        raise ConfigError(f"--compare takes settings like order=deadline,fifo, not {text!r}")
    return name.replace("-", "_"), chosen


def _variant(base: Variant, settings: Sequence[Setting]) -> Variant:
    variant = base
    for name, value in settings:
        variant = _with(variant, name, value)
    return replace(variant, name=" ".join(f"{name}={value}" for name, value in settings) or "base")


def _with(variant: Variant, name: str, value: str) -> Variant:
    if name == "workers":
        if not value.isdigit() or int(value) < 1:
            raise ConfigError(f"workers takes a number from 1 on, not {value!r}")
        return replace(variant, num_workers=int(value))
    if name == "batching":
        if value not in _BATCHING:
            raise ConfigError(f"batching is one of {', '.join(_BATCHING)}, not {value!r}")
        return _static(variant) if value == "static" else variant
    checked = load_config(None, {name: value})  # its mistakes are told as those of a flag
    component = flag_component(name)
    changed = getattr(variant.config, component).model_copy(update={name: getattr(getattr(checked, component), name)})
    return replace(variant, config=variant.config.model_copy(update={component: changed}))


def _static(variant: Variant) -> Variant:
    """Batches of as many as there are slots. The gate must let a whole batch's prompts through at once."""
    scheduler = variant.config.scheduler
    wide = scheduler.model_copy(update={"max_num_batched_tokens": 1 << 20})
    config = variant.config.model_copy(update={"scheduler": wide})
    return replace(variant, config=config, batching=StaticBatching(batch_size=scheduler.max_num_seqs))
