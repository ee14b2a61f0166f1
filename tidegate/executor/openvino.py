"""OpenVINOExecutor: computes StepPlans with the OpenVINO CPU kernels, on paged KV memory.

    launch:  check plan -> fill input tensors -> block copies -> start_async ─┐
    collect: wait (other threads run meanwhile) -> sample from the logits  <──┘

Owns the compiled model, one inference request and the memory of the blocks. Every fault of a step is an ExecutorError
and leaves the executor usable. Never keeps anything about a row between steps.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from openvino import InferRequest

from tidegate.config import KvCacheDtype
from tidegate.executor.base import ExecutorError, ExecutorInfo, StepHandle
from tidegate.executor.openvino_blocks import BlockMemory
from tidegate.executor.openvino_inputs import StepInputs, StepOutputs
from tidegate.executor.openvino_model import compile_paged_model
from tidegate.executor.sampler import Sampler
from tidegate.request import TokenLogprobs
from tidegate.scheduler.step import StepPlan, StepResult


@dataclass(frozen=True)
class ModelFacts:
    """What the IR does not say of itself. `weight_digest` empty: it is computed from the weights file."""

    name: str
    weight_format: str
    max_model_len: int
    weight_digest: str = ""


@dataclass(slots=True)
class OpenVINOStep:
    """The step in flight. `outputs` is None for a plan without rows, which computes nothing."""

    plan: StepPlan
    outputs: StepOutputs | None
    start_s: float


class OpenVINOExecutor:
    def __init__(
        self,
        ir_path: Path,
        model: ModelFacts,
        *,
        kv_memory: int,
        kv_cache_dtype: KvCacheDtype = "u8",
        num_threads: int = 0,
        max_num_batched_tokens: int = 512,
    ) -> None:
        """`ir_path` is the model's .xml; `kv_memory` in bytes. Raises ExecutorError with one clear line."""
        paged = compile_paged_model(ir_path, kv_cache_dtype, num_threads)
        self._compiled = paged.compiled
        self._blocks = BlockMemory(paged.cache_tensors, kv_memory)
        self._inputs = StepInputs(max_num_batched_tokens, self._blocks.num_blocks, paged.block_size, paged.vocab_size)
        self._sampler = Sampler(paged.vocab_size)
        self._request: InferRequest | None = self._new_request()
        self._in_flight: OpenVINOStep | None = None
        self.info = ExecutorInfo(
            model=model.name,
            weight_digest=model.weight_digest or _sha256(ir_path.with_suffix(".bin")),
            weight_format=model.weight_format,
            kv_cache_dtype=paged.precision.kv_cache_dtype,
            compute_dtype=paged.precision.compute_dtype,
            block_size=paged.block_size,
            num_blocks=self._blocks.num_blocks,
            bytes_per_block=self._blocks.bytes_per_block,
            vocab_size=paged.vocab_size,
            max_model_len=model.max_model_len,
        )

    @property
    def num_blocks(self) -> int:
        return self.info.num_blocks

    @property
    def block_size(self) -> int:
        return self.info.block_size

    def launch(self, plan: StepPlan) -> OpenVINOStep:
        """Start computing and return at once. Raises ExecutorError; the plan's blocks are then unchanged."""
        start_s = time.perf_counter()
        request = self._idle_request()
        outputs = self._inputs.fill(plan, request) if plan.rows else None
        if plan.block_copies:
            self._blocks.copy(plan.block_copies)
        if outputs is not None:
            try:
                request.start_async()
            except RuntimeError as error:
                raise self._failed(error) from error
        self._in_flight = OpenVINOStep(plan, outputs, start_s)
        return self._in_flight

    def collect(self, handle: StepHandle) -> StepResult:
        """Wait for the step and return its samples. Raises ExecutorError."""
        step = self._in_flight
        if step is None or handle is not step or self._request is None:
            raise ExecutorError("this step is not in flight")
        self._in_flight = None
        if step.outputs is None:
            return StepResult(token_ids=[], compute_s=time.perf_counter() - step.start_s)
        try:
            self._request.wait()
            logits = self._request.get_output_tensor().data.reshape(-1, self.info.vocab_size)
        except RuntimeError as error:
            raise self._failed(error) from error
        return self._sample(step, step.outputs, logits)

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, destination), in order."""
        self._idle_request()
        self._blocks.copy(pairs)

    def read_blocks(self, block_ids: list[int]) -> list[bytes]:
        """The raw content of blocks, all layers, one bytes object a block."""
        self._idle_request()
        return self._blocks.read(block_ids)

    def write_blocks(self, block_ids: list[int], data: list[bytes]) -> None:
        """The reverse of read_blocks. Raises ValueError when a size does not fit this executor's blocks."""
        self._idle_request()
        self._blocks.write(block_ids, data)

    def close(self) -> None:
        """Wait for a step in flight and give the inference request back. Nothing else may be called afterwards."""
        if self._request is not None and self._in_flight is not None and self._in_flight.outputs is not None:
            self._request.wait()
        self._in_flight = None
        self._request = None

    def _idle_request(self) -> InferRequest:
        if self._request is None:
            raise ExecutorError("the executor is closed")
        if self._in_flight is not None:
            raise ExecutorError(f"step {self._in_flight.plan.step_id} is still in flight")
        return self._request

    def _new_request(self) -> InferRequest:
        request = self._compiled.create_infer_request()
        for name, tensor in self._blocks.tensors.items():
            request.set_tensor(name, tensor)
        self._inputs.bind(request)
        return request

    def _failed(self, error: RuntimeError) -> ExecutorError:
        """A request that failed may hold broken state: the next step gets a new one."""
        self._request = self._new_request()
        return ExecutorError(f"the step could not be computed: {str(error).strip() or type(error).__name__}")

    def _sample(self, step: OpenVINOStep, outputs: StepOutputs, logits: npt.NDArray[np.float32]) -> StepResult:
        """`logits` is the request's own memory [rows wanted, vocab_size]: read here, before the next step."""
        sampled = logits[: outputs.num_sample_rows]
        if outputs.sample_indices is not None:
            sampled = sampled[outputs.sample_indices]
        token_ids, logprobs = self._sampler.sample(sampled, outputs.specs)
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        start = outputs.num_sample_rows
        for row in outputs.prompt_rows:
            next_token_ids = row.next_token_ids or []
            end = start + len(next_token_ids)
            prompt_logprobs[row.row_id] = self._sampler.token_logprobs(
                logits[start:end], next_token_ids, row.prompt_logprobs or 0
            )
            start = end
        return StepResult(
            token_ids=token_ids,
            compute_s=time.perf_counter() - step.start_s,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs or None,
        )


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ExecutorError(f"cannot read the weights {path}: {error.strerror}") from None
