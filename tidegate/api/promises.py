"""What a body asks of the service beside the answer: a service tier, objectives, a time limit.

Owns: the names of tiers that clients of other servers know, and the ranges of the objectives. What a tier promises and
whether that can be kept is the gate's business.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tidegate.api.errors import Outcome, Refused
from tidegate.api.schemas import SamplingFields
from tidegate.request import InvalidRequest
from tidegate.tenancy.tenants import ANONYMOUS, Tenant

DEFAULT_TIER = "default"
_OTHER_NAMES = {"auto": DEFAULT_TIER, "standard_only": DEFAULT_TIER, "scale": "priority", "fast": "priority"}
_MAX_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Promises:
    """`tier` is one that is offered. Objectives are None where the tier's own hold; `timeout_s` counts from arrival."""

    tier: str
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None
    timeout_s: float | None = None


def promises(body: SamplingFields, offered: Sequence[str], tenant: Tenant = ANONYMOUS) -> Promises:
    """Raises InvalidRequest for a tier that is not offered, or an objective that is no time; Refused for a tier that
    is not the tenant's."""
    slo = body.slo
    tier = tier_name(body.service_tier, offered, tenant.config.fallback_tier)
    allowed = tenant.config.tiers
    if allowed is not None and tier not in allowed:
        raise Refused(
            Outcome.TIER_FORBIDDEN, f"service_tier '{tier}' is not allowed with this key; allowed: {', '.join(allowed)}"
        )
    return Promises(
        tier=tier,
        ttft_slo_s=_seconds(None if slo is None else slo.ttft_ms, 1e-3, "slo.ttft_ms"),
        tpot_slo_s=_seconds(None if slo is None else slo.tpot_ms, 1e-3, "slo.tpot_ms"),
        timeout_s=_seconds(body.timeout_s, 1.0, "timeout_s"),
    )


def tier_name(asked: str | None, offered: Sequence[str], fallback: str = DEFAULT_TIER) -> str:
    """The offered tier that a client means. An operator's tier wins over another server's name for one."""
    if asked is None or (asked == "auto" and asked not in offered):
        return fallback
    name = asked if asked in offered else _OTHER_NAMES.get(asked)
    if name is None:
        allowed = ", ".join([*offered, *(other for other in _OTHER_NAMES if other not in offered)])
        raise InvalidRequest(f"unknown service_tier '{asked[:64]}'; allowed: {allowed}", param="service_tier")
    return name


def _seconds(value: float | None, unit_s: float, param: str) -> float | None:
    if value is None:
        return None
    seconds = value * unit_s
    if not (math.isfinite(seconds) and 0.0 < seconds <= _MAX_S):
        raise InvalidRequest(f"{param} must be above 0 and at most {_MAX_S / unit_s:,.0f}, not {value:g}", param=param)
    return seconds
