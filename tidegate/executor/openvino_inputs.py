"""StepInputs: a StepPlan as the flat input tensors of a paged model.

Owns one buffer an input, given to the inference request once and resized in place each step, so that a step costs one
pass over the rows and a few list-to-array copies. Checks what the library does not: a block or token id out of range
would read or write foreign memory there.

    rows:                [t t t t t] [t] [t t]       num_computed 0, 70, 32
    input_ids             t t t t t   t   t t        position_ids  0 1 2 3 4  70  32 33
    subsequence_begins    0           5   6     8    past_lens     0 70 32
    block_indices         a           b c d e f      block_indices_begins  0 1 4 6
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from openvino import InferRequest, Tensor

from tidegate.executor.base import ExecutorError
from tidegate.executor.openvino_model import SAMPLE_ROWS
from tidegate.scheduler.step import IN_FLIGHT_TOKEN, SampleSpec, StepPlan, StepRow

_INPUT_TYPES: dict[str, npt.DTypeLike] = {
    "input_ids": np.int64,
    "position_ids": np.int64,
    "past_lens": np.int32,
    "subsequence_begins": np.int32,
    "block_indices": np.int32,
    "block_indices_begins": np.int32,
    "max_context_len": np.int32,
    SAMPLE_ROWS: np.int64,
}


@dataclass(slots=True)
class StepOutputs:
    """Where in the logits each wanted row lies. `sample_indices` is None when spec i reads row i.

    The first `num_sample_rows` rows are for the specs; `prompt_rows` names, in order, the plan's rows whose tokens'
    logits follow.
    """

    specs: list[SampleSpec]
    sample_indices: list[int] | None
    num_sample_rows: int
    prompt_rows: list[StepRow]


class _Buffer:
    """One input: an array with room to spare and the tensor over it that the request holds."""

    def __init__(self, name: str, capacity: int) -> None:
        self.name = name
        self.array = np.zeros(capacity, dtype=_INPUT_TYPES[name])
        self.tensor = Tensor(self.array, shared_memory=True)

    def fill(self, values: list[int] | npt.NDArray[np.int64]) -> bool:
        """Take the values and the length; True when that took a new tensor, which the request must be given."""
        num_values = len(values)
        grown = num_values > len(self.array)
        if grown:
            self.array = np.zeros(num_values * 2, dtype=self.array.dtype)
            self.tensor = Tensor(self.array, shared_memory=True)
        self.array[:num_values] = values
        self.tensor.shape = [num_values]
        return grown


class StepInputs:
    def __init__(self, num_tokens: int, num_blocks: int, block_size: int, vocab_size: int) -> None:
        """`num_tokens` is the usual most of a step; larger plans make the buffers grow."""
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._max_context = np.zeros((), dtype=np.int32)
        self._max_context_tensor = Tensor(self._max_context, shared_memory=True)
        self._buffers = {name: _Buffer(name, num_tokens + 1) for name in _INPUT_TYPES if name != "max_context_len"}

    def bind(self, request: InferRequest) -> None:
        """Give the request the tensors, once; later steps change them in place."""
        request.set_tensor("max_context_len", self._max_context_tensor)
        for buffer in self._buffers.values():
            request.set_tensor(buffer.name, buffer.tensor)

    def fill(self, plan: StepPlan, request: InferRequest) -> StepOutputs:
        """Write the plan's rows into the tensors. Raises ExecutorError; the request must not run then."""
        token_ids: list[int] = []
        past_lens: list[int] = []
        begins: list[int] = [0]
        block_ids: list[int] = []
        block_begins: list[int] = [0]
        max_context = 0
        block_size = self._block_size
        for row in plan.rows:
            token_ids += row.token_ids
            num_computed = row.num_computed
            past_lens.append(num_computed)
            begins.append(len(token_ids))
            context = num_computed + len(row.token_ids)
            if context > max_context:
                max_context = context
            row_blocks = row.block_ids
            num_row_blocks = -(-context // block_size)
            if len(row_blocks) < num_row_blocks or not row.token_ids or num_computed < 0:
                raise ExecutorError(
                    f"row {row.row_id} has {len(row_blocks)} blocks for {num_computed} + {len(row.token_ids)} tokens"
                )
            block_ids += row_blocks if len(row_blocks) == num_row_blocks else row_blocks[:num_row_blocks]
            block_begins.append(len(block_ids))
        outputs, sample_rows = _sampled(plan, begins)
        self._check(token_ids, block_ids)
        self._max_context[...] = max_context
        values: dict[str, list[int] | npt.NDArray[np.int64]] = {
            "input_ids": token_ids,
            "position_ids": _positions(past_lens, begins),
            "past_lens": past_lens,
            "subsequence_begins": begins,
            "block_indices": block_ids,
            "block_indices_begins": block_begins,
            SAMPLE_ROWS: sample_rows,
        }
        for name, buffer in self._buffers.items():
            if buffer.fill(values[name]):
                request.set_tensor(name, buffer.tensor)
        return outputs

    def _check(self, token_ids: list[int], block_ids: list[int]) -> None:
        if min(token_ids) < 0 or max(token_ids) >= self._vocab_size:
            if IN_FLIGHT_TOKEN in token_ids:
                raise ExecutorError("this executor has no step in flight whose token a row could take")
            raise ExecutorError(f"a token id is outside the vocabulary of {self._vocab_size}")
        if min(block_ids) < 0 or max(block_ids) >= self._num_blocks:
            raise ExecutorError(f"a block id is outside 0 to {self._num_blocks - 1}")


def _positions(past_lens: list[int], begins: list[int]) -> list[int] | npt.NDArray[np.int64]:
    """The position of each token of the step in its sequence."""
    num_tokens = begins[-1]
    if num_tokens == len(past_lens):
        return past_lens  # decodes only: one token a row
    starts = np.array(begins, dtype=np.int64)
    shifts = np.array(past_lens, dtype=np.int64) - starts[:-1]
    return np.arange(num_tokens, dtype=np.int64) + np.repeat(shifts, np.diff(starts))


def _sampled(plan: StepPlan, begins: list[int]) -> tuple[StepOutputs, list[int]]:
    """Which tokens of the step need logits, each once in a run of equal ones, and who reads them."""
    specs: list[SampleSpec] = []
    sample_rows: list[int] = []
    sample_indices: list[int] = []
    prompt_rows: list[StepRow] = []
    for row, begin in zip(plan.rows, begins, strict=False):
        num_tokens = len(row.token_ids)
        for spec in row.samples:
            if not 0 <= spec.offset < num_tokens:
                raise ExecutorError(f"row {row.row_id} has {num_tokens} tokens and no sample at {spec.offset}")
            token = begin + spec.offset
            if not sample_rows or sample_rows[-1] != token:
                sample_rows.append(token)
            sample_indices.append(len(sample_rows) - 1)
            specs.append(spec)
        if row.prompt_logprobs is not None:
            prompt_rows.append(row)
    outputs = StepOutputs(
        specs=specs,
        sample_indices=None if len(sample_rows) == len(specs) else sample_indices,
        num_sample_rows=len(sample_rows),
        prompt_rows=prompt_rows,
    )
    if prompt_rows:
        for row, begin in zip(plan.rows, begins, strict=False):
            if row.prompt_logprobs is not None:
                num_next = len(row.next_token_ids or ())
                if num_next > len(row.token_ids):
                    raise ExecutorError(f"row {row.row_id} has {len(row.token_ids)} tokens and {num_next} successors")
                sample_rows.extend(range(begin, begin + num_next))
    return outputs, sample_rows
