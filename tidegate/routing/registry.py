"""The workers that are ready: what each serves, and what it last said of its load.

What each was given is the gate's to know (gate/dispatched.py): load is counted at dispatch, not from the next report.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.metrics.load_snapshot import LoadReport
from tidegate.worker.messages import WorkerInfo


@dataclass(slots=True)
class WorkerEntry:
    """A worker that is ready, and its last report."""

    info: WorkerInfo
    load: LoadReport | None = None

    @property
    def max_request_tokens(self) -> int:
        """The longest prompt plus answer it can hold; the last token of an answer needs no place in the cache."""
        return min(self.info.max_model_len, self.info.num_blocks * self.info.block_size + 1)


class WorkerRegistry:
    def __init__(self) -> None:
        self._workers: dict[str, WorkerEntry] = {}

    def __len__(self) -> int:
        return len(self._workers)

    def add(self, info: WorkerInfo) -> WorkerEntry:
        """A worker is ready. Raises ValueError when the id is taken by one that has not been removed."""
        if info.worker_id in self._workers:
            raise ValueError(f"worker {info.worker_id} is already there")
        entry = WorkerEntry(info)
        self._workers[info.worker_id] = entry
        return entry

    def remove(self, worker_id: str) -> WorkerEntry | None:
        return self._workers.pop(worker_id, None)

    def get(self, worker_id: str) -> WorkerEntry | None:
        return self._workers.get(worker_id)

    def all(self) -> list[WorkerEntry]:
        return list(self._workers.values())
