"""The wire between the frontend and its workers: msgspec structs, msgpack-encoded, one tagged union each way.

A worker's messages all carry its `incarnation`, so that late answers of a process that was replaced are discarded.
One StepReport goes out per step; it holds everything that step changed.
"""

from __future__ import annotations

import msgspec

from tidegate.cost_model import StepCost
from tidegate.metrics.load_snapshot import LoadReport, StepStats
from tidegate.request import Request, RequestOutput

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
