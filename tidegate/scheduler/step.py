"""StepPlan and StepResult: what the scheduler asks of the executor, and what comes back.

Plain data. The executor never sees a Request; the scheduler never sees a tensor.

A plan is a list of rows. A row computes `token_ids` at positions num_computed, num_computed + 1, ... of one sequence,
whose keys and values lie in `block_ids` (position p is in block_ids[p // block_size] at p % block_size). A prefill
chunk, a decode and a speculative check differ only in how many tokens a row has and which of them are sampled.

    tokens of the sequence:   0 1 2 3 | 4 5 6 7 | 8 9            block_size 4
    num_computed = 4, token_ids = [t4 .. t9], block_ids = [b0, b1, b2], samples = [SampleSpec(offset=5)]
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tidegate.request import SamplingParams, TokenLogprobs

IN_FLIGHT_TOKEN = -1
"""As a row's input: the token that the step in flight samples for the same row_id. For executors that overlap."""


@dataclass(slots=True)
class SampleSpec:
    """One token to draw from the logits at row token `offset`.

    Randomness is keyed by (seed, position); `position` is the number of output tokens before this one.
    `output_counts` (token id -> times produced) and `prompt_token_ids` are given when params.needs_history;
    `recent_token_ids` (the last tokens of the sequence, enough for the longest bad word) likewise.
    `banned_token_ids` must not be drawn (end-of-sequence ids before min_tokens).
    """

    offset: int
    seed: int
    position: int
    params: SamplingParams
    output_counts: dict[int, int] | None = None
    prompt_token_ids: list[int] | None = None
    recent_token_ids: list[int] | None = None
    banned_token_ids: tuple[int, ...] = ()


@dataclass(slots=True)
class StepRow:
    """One request's part of a step. `block_ids` may be longer than the row needs; extra ids are ignored.

    `prompt_logprobs`: when not None, log-probabilities of each *next* token of this row are wanted, with that many
    alternatives; `next_token_ids` names the token that follows each of `token_ids` (shorter by one when the last one
    has no known successor).
    """

    row_id: int
    token_ids: list[int]
    num_computed: int
    block_ids: list[int]
    samples: list[SampleSpec]
    prompt_logprobs: int | None = None
    next_token_ids: list[int] | None = None
    adapter_id: int = 0


@dataclass(slots=True)
class StepPlan:
    """`block_copies` (source, destination) are done before the rows are computed, in order.

    num_prefill_tokens + num_decode_rows + the context give the cost model its features: `num_decode_rows` counts rows
    that compute one token to sample the next, `num_context_tokens` all tokens attended to by all rows.
    """

    step_id: int
    rows: list[StepRow]
    num_prefill_tokens: int
    num_decode_rows: int
    num_context_tokens: int
    block_copies: list[tuple[int, int]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return self.num_prefill_tokens + self.num_decode_rows


@dataclass(slots=True)
class StepResult:
    """`token_ids` holds one id a sample, flat, rows in plan order and samples in row order.

    `logprobs`, when any sample asked for them, is parallel to token_ids. `prompt_logprobs` maps row_id to one
    TokenLogprobs for each of the row's next_token_ids. `compute_s` is the time from launch to the sampled ids.
    """

    token_ids: list[int]
    compute_s: float
    logprobs: list[TokenLogprobs | None] | None = None
    prompt_logprobs: dict[int, list[TokenLogprobs]] | None = None
