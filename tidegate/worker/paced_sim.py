"""`--executor sim`: the sim executor in real time, for trying clients and operations without any computing.

Owns: the waiting, which the sim executor leaves to whoever drives it, and a KV memory of the model's own shape.
"""

from __future__ import annotations

import time

from tidegate.config import Config
from tidegate.cost_model import StepCost
from tidegate.executor.base import ExecutorError, ExecutorInfo, StepHandle
from tidegate.executor.sim import SimExecutor, SimHandle
from tidegate.models.source import ModelSource
from tidegate.scheduler.step import StepPlan, StepResult

_BLOCK_SIZE = 32
_BYTES_PER_VALUE = {"u8": 1, "bf16": 2, "f32": 4}


class PacedSimExecutor:
    def __init__(self, sim: SimExecutor) -> None:
        self.info = sim.info
        self._sim = sim
        self._in_flight: SimHandle | None = None
        self._due_s = 0.0

    @property
    def step_cost(self) -> StepCost:
        """What its steps take, exactly."""
        return self._sim.step_cost

    @property
    def num_blocks(self) -> int:
        return self.info.num_blocks

    @property
    def block_size(self) -> int:
        return self.info.block_size

    def launch(self, plan: StepPlan) -> SimHandle:
        handle = self._in_flight = self._sim.launch(plan)
        self._due_s = time.monotonic() + handle.duration_s
        return handle

    def collect(self, handle: StepHandle) -> StepResult:
        """Sleeps until the step would have been computed."""
        step, self._in_flight = self._in_flight, None
        if step is None or step is not handle:
            raise ExecutorError("this step is not in flight")
        time.sleep(max(0.0, self._due_s - time.monotonic()))
        return self._sim.collect(step)

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        self._sim.copy_blocks(pairs)

    def read_blocks(self, block_ids: list[int]) -> list[bytes]:
        return self._sim.read_blocks(block_ids)

    def write_blocks(self, block_ids: list[int], data: list[bytes]) -> None:
        self._sim.write_blocks(block_ids, data)

    def close(self) -> None:
        self._sim.close()


def sim_info(model: ModelSource, config: Config) -> ExecutorInfo:
    """Raises ExecutorError when the KV memory is smaller than one block."""
    shape = model.architecture
    kv_cache_dtype = config.cache.kv_cache_dtype
    bytes_per_token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_size * _BYTES_PER_VALUE[kv_cache_dtype]
    bytes_per_block = _BLOCK_SIZE * bytes_per_token
    num_blocks = config.cache.kv_memory // bytes_per_block
    if num_blocks < 1:
        raise ExecutorError(
            f"--kv-memory {config.cache.kv_memory} is less than one KV block of {bytes_per_block} bytes"
        )
    return ExecutorInfo(
        model=model.name,
        weight_digest=model.weight_digest,
        weight_format=model.weight_format,
        kv_cache_dtype=kv_cache_dtype,
        compute_dtype="none (sim)",
        block_size=_BLOCK_SIZE,
        num_blocks=num_blocks,
        bytes_per_block=bytes_per_block,
        vocab_size=shape.vocab_size,
        max_model_len=shape.context_length,
    )


def first_text_token_id(model: ModelSource) -> int:
    """The sim executor draws ids from here on: control tokens have the first ids by custom, and would end an answer."""
    return max((token_id + 1 for token_id in model.stop_token_ids if token_id < 256), default=0)
