"""The wire between the frontend and its workers: msgspec structs, msgpack-encoded, one tagged union each way.

A worker's messages all carry its `incarnation`, so that late answers of a process that was replaced are discarded.
One StepReport goes out per step; it holds everything that step changed.
"""

from __future__ import annotations

import msgspec

from tidegate.config import SchedulerConfig
from tidegate.cost_model import StepCost
from tidegate.executor.base import ExecutorInfo
from tidegate.metrics.load_snapshot import LoadReport, StepStats
from tidegate.request import Request, RequestOutput
from tidegate.version import __version__

PROTOCOL_VERSION = 1


class WorkerInfo(msgspec.Struct, kw_only=True, frozen=True):
    """What a worker serves. `version` is the package's, and must equal the frontend's. `step_cost`: as measured at its
    start; None where it was not."""

    worker_id: str
    incarnation: str
    pid: int
    version: str
    protocol_version: int
    model: str
    weight_digest: str
    weight_format: str
    kv_cache_dtype: str
    compute_dtype: str
    block_size: int
    num_blocks: int
    bytes_per_block: int
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    step_cost: StepCost | None = None

    @classmethod
    def of(
        cls,
        info: ExecutorInfo,
        scheduler: SchedulerConfig,
        *,
        worker_id: str,
        incarnation: str,
        pid: int,
        step_cost: StepCost,
    ) -> WorkerInfo:
        """A worker of this version that runs this executor."""
        return cls(
            worker_id=worker_id,
            incarnation=incarnation,
            pid=pid,
            version=__version__,
            protocol_version=PROTOCOL_VERSION,
            model=info.model,
            weight_digest=info.weight_digest,
            weight_format=info.weight_format,
            kv_cache_dtype=info.kv_cache_dtype,
            compute_dtype=info.compute_dtype,
            block_size=info.block_size,
            num_blocks=info.num_blocks,
            bytes_per_block=info.bytes_per_block,
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            step_cost=step_cost,
        )


# Frontend to worker.


class Submit(msgspec.Struct, tag=True, frozen=True):
    request: Request


class Cancel(msgspec.Struct, tag=True, frozen=True):
    request_id: str


class Shutdown(msgspec.Struct, tag=True, frozen=True):
    """Stop now. Draining is the frontend's business: it sends this when nothing runs any more."""


ToWorker = Submit | Cancel | Shutdown


# Worker to frontend.


class Loading(msgspec.Struct, tag=True, frozen=True):
    incarnation: str
    message: str


class Ready(msgspec.Struct, tag=True, frozen=True):
    incarnation: str
    info: WorkerInfo


class StartFailed(msgspec.Struct, tag=True, frozen=True):
    """The worker could not start; `message` is the one line for the operator."""

    incarnation: str
    message: str


class StepReport(msgspec.Struct, tag=True, frozen=True):
    """`stats` is None when no step ran (a cancel on an idle engine, a heartbeat)."""

    incarnation: str
    outputs: list[RequestOutput]
    load: LoadReport
    stats: StepStats | None = None


FromWorker = Loading | Ready | StartFailed | StepReport
