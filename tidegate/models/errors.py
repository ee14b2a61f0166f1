"""ModelError: a model that is missing, damaged or not supported. One line for the operator; exit code 2."""

from __future__ import annotations

from tidegate.config import ConfigError


class ModelError(ConfigError):
    """Says which model, what is wrong with it, and what to do."""
