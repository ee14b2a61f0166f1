"""Reloader: at SIGHUP the configuration is read again, and what can change while serving is changed.

All or nothing: a file with any mistake in it is one line in the log, and the running configuration stays. Only the
tiers, the tenants and the gate's settings can change; others that differ are named, and wait for the next start.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from tidegate.config import Config, ConfigError

_CHANGEABLE = ("gate", "tiers", "tenants")

log = logging.getLogger("tidegate.api")


class Reloader:
    """Called at each SIGHUP."""

    def __init__(self, config: Config, load: Callable[[], Config], apply: Callable[[Config], None]) -> None:
        self._config = config
        self._load = load
        self._apply = apply

    def __call__(self) -> None:
        try:
            new = self._load()
        except ConfigError as error:
            log.error("the configuration stays as it is: %s", error)
            return
        self._apply(new)
        changed = [name for name in _CHANGEABLE if getattr(new, name) != getattr(self._config, name)]
        log.info("configuration read again; changed: %s", ", ".join(changed) or "nothing")
        waiting = [
            name
            for name in Config.model_fields
            if name not in _CHANGEABLE and getattr(new, name) != getattr(self._config, name)
        ]
        if waiting:
            log.warning("these settings have changed and take effect at the next start: %s", ", ".join(waiting))
        self._config = self._config.model_copy(update={name: getattr(new, name) for name in _CHANGEABLE})
