"""The workers the gate knows: what each serves, what it was given, and what it last said of its load.

Load is counted at dispatch: what was sent counts from that moment on, not from the worker's next report.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tidegate.metrics.load_snapshot import LoadReport
from tidegate.worker.messages import WorkerInfo


@dataclass(slots=True)
class WorkerEntry:
    """`outstanding` maps the ids of the requests dispatched and not ended there to their number of choices."""

    info: WorkerInfo
    load: LoadReport | None = None
    outstanding: dict[str, int] = field(default_factory=dict)

    @property
    def num_outstanding(self) -> int:
        return sum(self.outstanding.values())

    @property
    def max_request_tokens(self) -> int:
        """The longest prompt plus answer it can hold; the last token of an answer needs no place in the cache."""
        return min(self.info.max_model_len, self.info.num_blocks * self.info.block_size + 1)

    def num_usable_slots(self) -> int:
        """Slots that a request sent now could get: all, or only those in use when something waits there for blocks
        or for its prefill's turn."""
        load = self.load
        if load is not None and load.num_waiting > 0 and load.num_running < self.info.max_num_seqs:
            return load.num_running
        return self.info.max_num_seqs


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
