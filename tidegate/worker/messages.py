"""The wire between the frontend and its workers: msgspec structs, msgpack-encoded, one tagged union each way.

A worker's messages all carry its `incarnation`, so that late answers of a process that was replaced are discarded.
One StepReport goes out per step; it holds everything that step changed.
"""

from __future__ import annotations

import msgspec

from tidegate.request import Request, RequestOutput

PROTOCOL_VERSION = 1


class WorkerInfo(msgspec.Struct, kw_only=True, frozen=True):
    """What a worker serves. `version` is the package's, and must equal the frontend's."""

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


class LoadReport(msgspec.Struct, array_like=True, frozen=True):
    """The worker's load at a step boundary (monotonic seconds; tokens and blocks as counts).

    num_waiting: dispatched or preempted, not in a slot. num_waiting_tokens: prompt tokens that those, and running
    prefills, still have to compute. The step_* fields describe the step that has just been launched (0 when idle):
    its start, its composition, and with them the arrival phase of what is submitted now.
    """

    time_s: float
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    num_context_tokens: int
    free_blocks: int
    cached_blocks: int
    held_blocks: int
    step_start_s: float
    step_prefill_tokens: int
    step_decode_rows: int


class StepStats(msgspec.Struct, array_like=True, frozen=True):
    """A step that has ended: its composition and its times, for the metrics and the cost model."""

    step_id: int
    start_s: float
    compute_s: float
    loop_s: float
    num_prefill_tokens: int
    num_decode_rows: int
    num_context_tokens: int
    num_preemptions: int
    num_evictions: int


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
