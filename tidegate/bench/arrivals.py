"""Arrival processes: when requests come, in seconds from the start. Pure and seeded.

All but the closed loop are open: they do not wait for answers, as the public does not. Rates are means over the run.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from tidegate.config import Duration


class _Spec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class PoissonArrivals(_Spec):
    kind: Literal["poisson"] = "poisson"


class GammaArrivals(_Spec):
    """Gaps are gamma distributed with shape 1 / burstiness: 1 is Poisson, more is burstier (variance / mean^2)."""

    kind: Literal["gamma"] = "gamma"
    burstiness: float = Field(2.0, gt=0)


class ConstantArrivals(_Spec):
    kind: Literal["constant"] = "constant"


class StepArrivals(_Spec):
    """Poisson whose rate changes: `scales` times the mean rate, for equal parts of the run."""

    kind: Literal["steps"] = "steps"
    scales: tuple[float, ...] = Field((0.5, 2.0, 0.5), min_length=1)


class ClosedArrivals(_Spec):
    """`clients` that each send the next request `think` (mean, exponential) after the answer to the one before."""

    kind: Literal["closed"] = "closed"
    clients: int = Field(16, ge=1)
    think: Duration = Field(0.0, ge=0)
    max_rate_per_client: float = Field(20.0, gt=0)


Arrivals = Annotated[
    PoissonArrivals | GammaArrivals | ConstantArrivals | StepArrivals | ClosedArrivals, Field(discriminator="kind")
]
OpenArrivals = PoissonArrivals | GammaArrivals | ConstantArrivals | StepArrivals


def arrival_times(arrivals: OpenArrivals, rate: float, duration_s: float, rng: random.Random) -> Iterator[float]:
    """Ascending times below `duration_s`, `rate` a second on average."""
    if isinstance(arrivals, StepArrivals):
        part_s = duration_s / len(arrivals.scales)
        for place, scale in enumerate(arrivals.scales):
            if scale > 0:
                for time_s in arrival_times(PoissonArrivals(), rate * scale, part_s, rng):
                    yield place * part_s + time_s
        return
    time_s = 0.0
    while True:
        time_s += _gap_s(arrivals, rate, rng)
        if time_s >= duration_s:
            return
        yield time_s


def _gap_s(arrivals: PoissonArrivals | GammaArrivals | ConstantArrivals, rate: float, rng: random.Random) -> float:
    match arrivals:
        case PoissonArrivals():
            return rng.expovariate(rate)
        case GammaArrivals():
            return rng.gammavariate(1.0 / arrivals.burstiness, arrivals.burstiness / rate)
        case ConstantArrivals():
            return 1.0 / rate
