"""What all tests share: how hypothesis runs, and the default model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tidegate.models import ModelSource

# The same examples every time, on a machine of any speed: a failure here is a failure there.
settings.register_profile(
    "tidegate", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tidegate")


@pytest.fixture(scope="session")
def default_model() -> ModelSource:
    """The default model, fetched once into the user's cache folder, where `tidegate serve` also finds it."""
    from tidegate.config import ModelConfig
    from tidegate.models.load import resolve_model

    return resolve_model(ModelConfig().model)
