"""Which of the workers that can take a request gets it."""

from __future__ import annotations

from collections.abc import Iterable

from tidegate.routing.registry import WorkerEntry


def least_load(workers: Iterable[WorkerEntry]) -> WorkerEntry | None:
    """The one with the fewest requests for its slots; None when there is none."""
    return min(workers, key=lambda worker: worker.num_outstanding / worker.info.max_num_seqs, default=None)
