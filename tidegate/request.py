"""The words every stage shares: Request, SamplingParams, Phase, FinishReason, RequestOutput.

Owns: plain data that crosses stages and processes (msgspec structs, so that the wire needs no second copy of them).
Never does: I/O, scheduling, or anything that depends on time.

The life of a request (Phase):

    QUEUED ──dispatch──> DISPATCHED ──joins the batch──> RUNNING ──last token──> FINISHED
      │                       │                           │   ▲                     ▲
      │                       │                    blocks │   │ blocks              │
      │                       │                   run out ▼   │ again               │
      │                       │                         PREEMPTED                   │
      └───────────────────────┴──── cancel, expiry, fault (from every phase) ───────┘

A request waits in the gate (QUEUED), in the short look-ahead of a worker (DISPATCHED), or in the worker because it
had to give its blocks back (PREEMPTED: it keeps its place, and replays what it had).
"""

from __future__ import annotations

import math
from enum import StrEnum

import msgspec

MAX_SEED = 2**63 - 1


class InvalidRequest(ValueError):
    """A user's mistake, found before any compute. `param` names the field at fault; `code` is machine-readable."""

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class Phase(StrEnum):
    QUEUED = "queued"
    DISPATCHED = "dispatched"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Why a choice ended. STOP and LENGTH are answers; the others are not."""

    STOP = "stop"  # end-of-sequence, a stop token or a stop string
    LENGTH = "length"  # max_tokens or the model's length
    ABORT = "abort"  # the client went away or cancelled
    ERROR = "error"  # a fault on our side


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to choose tokens. Field names and meanings are those of the OpenAI API and of vLLM's extensions to it.

    `max_tokens=None` means up to the model's length. `top_k` 0 or -1 is off. `logprobs` is the number of alternatives
    to report beside the chosen token (0: only the chosen one); None is off. `bad_words` holds token id sequences.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        """Raises InvalidRequest when a value is out of its range (NaN and infinities always are)."""
        for name, low, high in _FLOAT_RANGES:
            value = getattr(self, name)
            if not (isinstance(value, (int, float)) and math.isfinite(value) and low <= value <= high):
                raise InvalidRequest(f"{name} must be a number from {low:g} to {high:g}, not {value!r}", param=name)
        for name, low_i, high_i in _INT_RANGES:
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not low_i <= value <= high_i:
                raise InvalidRequest(f"{name} must be an integer from {low_i} to {high_i}, not {value!r}", param=name)
        if self.top_p == 0.0:
            raise InvalidRequest("top_p must be above 0", param="top_p")
        if self.repetition_penalty == 0.0:
            raise InvalidRequest("repetition_penalty must be above 0", param="repetition_penalty")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens})", param="min_tokens"
            )
        for token_id, bias in (self.logit_bias or {}).items():
            if not (math.isfinite(bias) and -100.0 <= bias <= 100.0):
                raise InvalidRequest(f"logit_bias of token {token_id} must be from -100 to 100", param="logit_bias")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequest("allowed_token_ids must not be empty", param="allowed_token_ids")
        if any(not word for word in self.bad_words):
            raise InvalidRequest("bad_words must not hold an empty word", param="bad_words")
        if any(not text for text in self.stop):
            raise InvalidRequest("stop must not hold an empty string", param="stop")

    @property
    def needs_history(self) -> bool:
        """Whether the choice of a token depends on which tokens came before (penalties and bad words)."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
            or bool(self.bad_words)
        )


_FLOAT_RANGES: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0.0, 2.0),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", 0.0, 10.0),
)
_INT_RANGES: tuple[tuple[str, int, int], ...] = (
    ("max_tokens", 1, 2**31 - 1),
    ("min_tokens", 0, 2**31 - 1),
    ("top_k", -1, 2**31 - 1),
    ("seed", -(2**63), MAX_SEED),
    ("n", 1, 128),
    ("logprobs", 0, 20),
    ("prompt_logprobs", 0, 20),
)


class Request(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One prompt to be continued, `params.n` times. Everything a worker needs, and nothing of HTTP.

    `request_id` is ours, never a client's. `max_tokens` is the resolved cap on output tokens (>= 1), and
    `stop_token_ids` the resolved set of ids that end a choice (end-of-sequence ids included unless ignored).
    `namespace` roots the block hashes; the server assigns it. `seed` is always set, so that a replay draws the same.
    Choice i of n samples with seed + i. `priority` is the rank of its tier (lower is served first), and `order_key` its
    place among equals (lower is served first; the gate sets it). `is_borrowing`: its slot is beyond its tenant's share,
    and it makes way for those of its tier whose is not. `max_kv_share`: of a worker's blocks, all of its tenant
    may hold so much. The objectives are None where there is none. `arrival_s` is when the first byte of the
    request was read. `session_id` marks a conversation; what only it uses leaves the cache after `session_ttl_s` of
    silence (None: the configured time).
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    seed: int
    arrival_s: float
    stop_token_ids: tuple[int, ...] = ()
    namespace: str = ""
    tenant: str = ""
    tier: str = "default"
    priority: int = 0
    order_key: float = 0.0
    is_borrowing: bool = False
    max_kv_share: float = 1.0
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None
    session_id: str = ""
    session_ttl_s: float | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def max_total_tokens(self) -> int:
        """Tokens of prompt and longest answer."""
        return len(self.prompt_token_ids) + self.max_tokens


class TokenLogprobs(msgspec.Struct, array_like=True, frozen=True):
    """Natural-log probabilities at one position: of the token that is there, and of the most likely ones."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class PrefillTimes(msgspec.Struct, array_like=True, frozen=True):
    """The worker's part of a request's timeline up to its first token; times on the worker's monotonic clock.

    received_s: taken in by the engine. scheduled_s: start of the first step that computed for it.
    first_token_s: end of the step that sampled its first token.
    own_prefill_s + interference_s = first_token_s - scheduled_s: the step time its own tokens cost, and the rest.
    num_cached_tokens: prompt tokens that were not computed because their blocks were cached.
    """

    received_s: float
    scheduled_s: float
    first_token_s: float
    own_prefill_s: float
    interference_s: float
    num_cached_tokens: int


class RequestOutput(msgspec.Struct, array_like=True, omit_defaults=True):
    """What one step brought one choice of a request. The last one of a choice has a finish_reason.

    `prefill` comes with the first output of choice 0. `logprobs` is parallel to token_ids when it was asked for.
    `prompt_logprobs` (first output of choice 0 only) has one entry a prompt token, the first of which is None.
    `error` is set with FinishReason.ERROR only.
    """

    request_id: str
    index: int
    token_ids: list[int]
    time_s: float
    finish_reason: FinishReason | None = None
    prefill: PrefillTimes | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    error: str = ""
    num_preemptions: int = 0
