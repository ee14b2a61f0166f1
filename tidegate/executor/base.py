"""The contract between an engine and whatever computes its steps.

An executor owns the memory of the KV blocks and the model's weights. It knows nothing of requests, queues or caches.
`launch` and `collect` are two calls so that the loop can do its own work while the step runs; at most one step is in
flight. `read_blocks` and `write_blocks` are for handoff between workers and may only be called with none in flight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tidegate.scheduler.step import StepPlan, StepResult


class ExecutorError(RuntimeError):
    """A step could not be computed. The requests of its plan fail; the engine goes on."""


@dataclass(frozen=True)
class ExecutorInfo:
    """What start-up prints and the wire compares. `weight_digest` is a hex SHA-256 of the weights served."""

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


class StepHandle(Protocol):
    """A step in flight. Opaque, except that its plan can be asked for."""

    plan: StepPlan


class Executor(Protocol):
    info: ExecutorInfo

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    def launch(self, plan: StepPlan) -> StepHandle:
        """Start computing and return at once. Raises ExecutorError; the plan's blocks are then unchanged."""
        ...

    def collect(self, handle: StepHandle) -> StepResult:
        """Wait for the step and return its samples. Raises ExecutorError."""
        ...

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, destination), in order."""
        ...

    def read_blocks(self, block_ids: list[int]) -> list[bytes]:
        """The raw content of blocks, all layers, one bytes object a block."""
        ...

    def write_blocks(self, block_ids: list[int], data: list[bytes]) -> None:
        """The reverse of read_blocks. Raises ValueError when a size does not fit this executor's blocks."""
        ...

    def close(self) -> None: ...
