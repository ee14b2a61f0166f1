"""Workloads by name, and from a TOML file.

`uniform` and `heavy` are the two mixes that admission is judged on: every answer has a known length, either because
end-of-sequence is ignored (uniform) or because the client asks for 1,024 tokens and hangs up earlier, as real ones do
(heavy). The others are shaped like what their names say, at a size that a small machine can take.
"""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path

from pydantic import ValidationError

from tidegate.bench.arrivals import ClosedArrivals, GammaArrivals
from tidegate.bench.workload import (
    Conversations,
    FixedLength,
    LengthClass,
    LognormalLength,
    SharedPrefix,
    TenantSpec,
    UniformLength,
    Workload,
)
from tidegate.config import ConfigError


def _uniform(minimum: int, maximum: int) -> UniformLength:
    return UniformLength(min=minimum, max=maximum)


_SHORT_PROMPTS = LengthClass(
    name="short", share=0.9, prompt=_uniform(32, 256), output=_uniform(16, 300), max_tokens=1_024
)
_LONG_PROMPTS = LengthClass(
    name="long", share=0.1, prompt=_uniform(2_000, 6_000), output=_uniform(16, 300), max_tokens=1_024
)

PRESETS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload(name="uniform", classes=(LengthClass(prompt=_uniform(64, 512), output=_uniform(32, 128)),)),
        Workload(name="heavy", classes=(_SHORT_PROMPTS, _LONG_PROMPTS)),
        Workload(
            name="chat",
            format="chat",
            classes=(
                LengthClass(
                    prompt=LognormalLength(median=40, sigma=0.8, min=8, max=400),
                    output=LognormalLength(median=90, sigma=0.6, min=16, max=300),
                ),
            ),
            shared_prefix=SharedPrefix(count=4, tokens=FixedLength(tokens=160)),
            conversations=Conversations(turns=_uniform(1, 6), think=4.0),
        ),
        Workload(
            name="code",
            arrivals=GammaArrivals(burstiness=4.0),
            classes=(
                LengthClass(
                    prompt=LognormalLength(median=300, sigma=0.9, min=32, max=2_500),
                    output=LognormalLength(median=20, sigma=0.9, min=4, max=200),
                ),
            ),
            shared_prefix=SharedPrefix(count=12, tokens=_uniform(500, 1_500), share=0.7),
        ),
        Workload(
            name="rag",
            classes=(LengthClass(prompt=_uniform(32, 128), output=_uniform(40, 160)),),
            shared_prefix=SharedPrefix(count=48, tokens=_uniform(1_000, 2_500), zipf=0.9),
        ),
        Workload(
            name="batch",
            arrivals=ClosedArrivals(clients=32),
            classes=(LengthClass(prompt=_uniform(128, 1_024), output=_uniform(128, 256)),),
            tenants=(TenantSpec(name="batch", tier="flex"),),
        ),
        Workload(
            name="mixed",
            classes=(
                LengthClass(name="short", share=0.7, prompt=_uniform(32, 256), output=_uniform(16, 128)),
                LengthClass(name="medium", share=0.2, prompt=_uniform(256, 1_024), output=_uniform(64, 256)),
                LengthClass(name="long", share=0.1, prompt=_uniform(2_000, 4_000), output=_uniform(16, 128)),
            ),
            tenants=(
                TenantSpec(name="interactive", share=0.3, tier="priority", classes=("short",)),
                TenantSpec(name="app", share=0.4, tier="default"),
                TenantSpec(name="bulk", share=0.3, tier="flex"),
            ),
        ),
    )
}


def load_workload(name: str) -> Workload:
    """A preset's name, or a TOML file. Raises ConfigError."""
    preset = PRESETS.get(name)
    if preset is not None:
        return preset
    path = Path(name)
    if not path.is_file():
        close = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"presets: {', '.join(PRESETS)}; or give a TOML file"
        raise ConfigError(f"no workload '{name}'; {hint}")
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
        workload = Workload.model_validate({"name": path.stem} | document)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{path}: '{where}': {first['msg']}") from None
    if workload.conversations is not None and workload.format == "tokens":
        raise ConfigError(f"{path}: conversations resend what was answered, which needs format text or chat")
    return workload
