"""UsageStore: sums per hour, tenant, tier and measure, in SQLite.

Owns: the file, and the thread that writes it twice a second. `add` only counts in memory, so nothing waits for a disk.
What was counted since the last write is written in one transaction, and forgotten in memory once that is committed: a
process that is killed loses the last second at most, and nothing is ever counted twice.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tidegate.config import ConfigError

HOUR_S = 3600
_WRITE_EVERY_S = 0.5
_SCHEMA = """
CREATE TABLE IF NOT EXISTS usage (
    hour INTEGER NOT NULL, tenant TEXT NOT NULL, tier TEXT NOT NULL, measure TEXT NOT NULL, amount INTEGER NOT NULL,
    PRIMARY KEY (hour, tenant, tier, measure)
) WITHOUT ROWID
"""
_ADD = """
INSERT INTO usage VALUES (?, ?, ?, ?, ?)
ON CONFLICT (hour, tenant, tier, measure) DO UPDATE SET amount = amount + excluded.amount
"""

Key = tuple[int, str, str, str]
"""(hour since 1970, tenant, tier, measure)"""

log = logging.getLogger("tidegate.usage")


class UsageStore:
    def __init__(self, path: Path, *, unix_time: Callable[[], float] = time.time) -> None:
        """Opens or makes the file. Raises ConfigError."""
        self._path = path
        self._unix_time = unix_time
        self._pending: Counter[Key] = Counter()
        self._lock = threading.Lock()
        self._is_closing = threading.Event()
        try:
            self._database = sqlite3.connect(path, check_same_thread=False, isolation_level=None, timeout=5.0)
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute(_SCHEMA)
        except sqlite3.Error as error:
            raise ConfigError(f"cannot keep usage in {path}: {error}") from None
        self._writer = threading.Thread(target=self._write_on, name="usage", daemon=True)
        self._writer.start()

    def add(self, tenant: str, tier: str, measure: str, amount: int = 1) -> None:
        if amount:
            with self._lock:
                self._pending[int(self._unix_time() // HOUR_S), tenant, tier, measure] += amount

    def flush(self) -> None:
        """Write what has been counted. What cannot be written now is kept for the next time."""
        with self._lock:
            counted, self._pending = self._pending, Counter()
        if not counted:
            return
        try:
            self._database.execute("BEGIN IMMEDIATE")
            self._database.executemany(_ADD, [(*key, amount) for key, amount in counted.items()])
            self._database.execute("COMMIT")
        except sqlite3.Error as error:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            with self._lock:
                self._pending.update(counted)
            log.error("usage cannot be written to %s: %s", self._path, error)

    def close(self) -> None:
        """Write what is left, and close the file."""
        self._is_closing.set()
        self._writer.join()
        self.flush()
        self._database.close()

    def tokens_since(self, tenant: str, unix_s: float) -> int:
        """Tokens of prompts and answers from the hour of `unix_s` on."""
        (total,) = self._database.execute(
            "SELECT coalesce(sum(amount), 0) FROM usage WHERE tenant = ? AND hour >= ? "
            "AND measure IN ('prompt_tokens', 'output_tokens')",
            (tenant, int(unix_s // HOUR_S)),
        ).fetchone()
        return int(total)

    def _write_on(self) -> None:
        while not self._is_closing.wait(_WRITE_EVERY_S):
            self.flush()


def read_usage(path: Path, since_unix_s: float) -> Counter[Key]:
    """All sums from the hour of `since_unix_s` on. The file may be in use. Raises ConfigError."""
    if not path.exists():
        raise ConfigError(f"there is no usage file {path}")
    try:
        database = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=5.0)
        try:
            rows = database.execute(
                "SELECT hour, tenant, tier, measure, amount FROM usage WHERE hour >= ?", (int(since_unix_s // HOUR_S),)
            ).fetchall()
        finally:
            database.close()
    except sqlite3.Error as error:
        raise ConfigError(f"cannot read usage from {path}: {error}") from None
    return Counter({(hour, tenant, tier, measure): amount for hour, tenant, tier, measure, amount in rows})
