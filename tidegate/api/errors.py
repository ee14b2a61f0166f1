"""How requests end and what the client is told: one table from outcome to HTTP status, error type and retry advice.

Owns: Outcome, Refused, the table, and the JSON body of an error. Every error that leaves the server is made here.
Never does: I/O. An exception's text reaches a client only when it is one of ours; a fault's details stay in the log.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

from tidegate.request import InvalidRequest


class Outcome(StrEnum):
    """How a request ended. STOP and LENGTH are the answers that were asked for, CLAMPED and TIMEOUT (once it has begun)
    are shorter ones; the value is the `outcome` label and the error's `code`."""

    STOP = "stop"
    LENGTH = "length"
    CLAMPED = "clamped"  # cut at the length that admission had lowered it to
    TIMEOUT = "timeout"  # its own timeout_s has passed
    CANCELLED = "cancelled"  # the client went away
    SLOW_READER = "slow_reader"  # the client stopped reading
    ERROR = "internal_error"  # a fault on our side
    WORKER_FAILED = "worker_failed"  # its worker died, and it could not be replayed
    QUEUE_FULL = "queue_full"
    QUEUE_TIMEOUT = "queue_timeout"
    TTFT_UNREACHABLE = "ttft_unreachable"  # its first token would come, or has not come, within its objective
    TPOT_UNREACHABLE = "tpot_unreachable"  # its tokens would come too slowly
    OTHERS_TTFT = "others_ttft"  # those that wait already would miss theirs
    LONG_SHARE = "long_share"  # long prompts have had their share of a server that has to refuse
    REQUESTS_PER_MINUTE = "requests_per_minute"  # the tenant's quotas
    TOKENS_PER_MINUTE = "tokens_per_minute"
    TOKENS_PER_DAY = "tokens_per_day"
    TOKENS_PER_MONTH = "tokens_per_month"
    MAX_CONCURRENT = "max_concurrent"
    OVER_QUOTA = "over_quota"  # one request is more than all that the tenant may use
    TIER_FORBIDDEN = "tier_forbidden"
    NEVER_FITS = "never_fits"  # needs more KV blocks than there are
    CONTEXT_LENGTH = "context_length_exceeded"
    LOADING = "loading"
    DRAINING = "draining"
    NO_WORKERS = "no_workers"
    INVALID = "invalid_request"
    INVALID_JSON = "invalid_json"
    UNSUPPORTED = "unsupported_parameter"
    UNAUTHORIZED = "invalid_api_key"
    NOT_FOUND = "not_found"
    MODEL_NOT_FOUND = "model_not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    BODY_TIMEOUT = "request_timeout"
    BODY_TOO_LARGE = "request_too_large"
    MEDIA_TYPE = "unsupported_media_type"
    HEADERS_TOO_LARGE = "headers_too_large"
    INVALID_HTTP = "invalid_http"
    TOO_MANY_CONNECTIONS = "too_many_connections"


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """`retry_after_s` and `should_retry` are the default advice; a Refused may know better."""

    status: int
    type: str
    retry_after_s: float | None = None
    should_retry: bool = False


ADMISSION_HEADER = b"x-tidegate-admission"
_INVALID = "invalid_request_error"
ERROR_TABLE: dict[Outcome, ErrorRow] = {
    Outcome.CANCELLED: ErrorRow(499, "request_cancelled"),
    Outcome.SLOW_READER: ErrorRow(408, "timeout_error"),
    Outcome.ERROR: ErrorRow(500, "server_error"),
    Outcome.WORKER_FAILED: ErrorRow(503, "server_error", retry_after_s=1.0, should_retry=True),
    Outcome.QUEUE_FULL: ErrorRow(429, "rate_limit_error", retry_after_s=1.0, should_retry=True),
    Outcome.QUEUE_TIMEOUT: ErrorRow(429, "rate_limit_error", retry_after_s=1.0, should_retry=True),
    Outcome.TTFT_UNREACHABLE: ErrorRow(429, "rate_limit_error", retry_after_s=1.0, should_retry=True),
    Outcome.TPOT_UNREACHABLE: ErrorRow(429, "rate_limit_error", retry_after_s=1.0, should_retry=True),
    Outcome.OTHERS_TTFT: ErrorRow(429, "rate_limit_error", retry_after_s=1.0, should_retry=True),
    Outcome.LONG_SHARE: ErrorRow(429, "rate_limit_error", retry_after_s=1.0, should_retry=True),
    Outcome.TIMEOUT: ErrorRow(408, "timeout_error"),
    Outcome.REQUESTS_PER_MINUTE: ErrorRow(429, "rate_limit_error", retry_after_s=1.0, should_retry=True),
    Outcome.TOKENS_PER_MINUTE: ErrorRow(429, "rate_limit_error", retry_after_s=1.0, should_retry=True),
    Outcome.TOKENS_PER_DAY: ErrorRow(429, "insufficient_quota"),
    Outcome.TOKENS_PER_MONTH: ErrorRow(429, "insufficient_quota"),
    Outcome.MAX_CONCURRENT: ErrorRow(429, "rate_limit_error", retry_after_s=1.0, should_retry=True),
    Outcome.OVER_QUOTA: ErrorRow(400, _INVALID),
    Outcome.TIER_FORBIDDEN: ErrorRow(403, "permission_error"),
    Outcome.NEVER_FITS: ErrorRow(400, _INVALID),
    Outcome.CONTEXT_LENGTH: ErrorRow(400, _INVALID),
    Outcome.LOADING: ErrorRow(503, "server_error", retry_after_s=2.0, should_retry=True),
    Outcome.DRAINING: ErrorRow(503, "server_error", retry_after_s=1.0, should_retry=True),
    Outcome.NO_WORKERS: ErrorRow(503, "server_error", retry_after_s=2.0, should_retry=True),
    Outcome.INVALID: ErrorRow(400, _INVALID),
    Outcome.INVALID_JSON: ErrorRow(400, _INVALID),
    Outcome.UNSUPPORTED: ErrorRow(400, _INVALID),
    Outcome.UNAUTHORIZED: ErrorRow(401, "authentication_error"),
    Outcome.NOT_FOUND: ErrorRow(404, _INVALID),
    Outcome.MODEL_NOT_FOUND: ErrorRow(404, _INVALID),
    Outcome.METHOD_NOT_ALLOWED: ErrorRow(405, _INVALID),
    Outcome.BODY_TIMEOUT: ErrorRow(408, "timeout_error"),
    Outcome.BODY_TOO_LARGE: ErrorRow(413, _INVALID),
    Outcome.MEDIA_TYPE: ErrorRow(415, _INVALID),
    Outcome.HEADERS_TOO_LARGE: ErrorRow(431, _INVALID),
    Outcome.INVALID_HTTP: ErrorRow(400, _INVALID),
    Outcome.TOO_MANY_CONNECTIONS: ErrorRow(503, "server_error", retry_after_s=1.0, should_retry=True),
}

_OUTCOME_OF_CODE = {str(outcome): outcome for outcome, row in ERROR_TABLE.items() if 400 <= row.status < 500}


class Refused(Exception):
    """A request that gets no answer, with what its client is told. Raised by a Service, at submit or by the stream.

    `message` is one sentence with the numbers it rests on. `retry_after_s` None takes the table's. `numbers` are those
    of admission, where it was admission that refused.
    """

    def __init__(
        self,
        outcome: Outcome,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        should_retry: bool | None = None,
        numbers: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(message)
        self.numbers = numbers
        self.outcome = outcome
        self.message = message
        self.param = param
        row = ERROR_TABLE[outcome]
        self.retry_after_s = row.retry_after_s if retry_after_s is None else retry_after_s
        self.should_retry = row.should_retry if should_retry is None else should_retry

    @classmethod
    def of(cls, error: InvalidRequest) -> Refused:
        """The refusal that a user's mistake leads to. A code that the table lacks is plain `invalid_request`."""
        outcome = _OUTCOME_OF_CODE.get(error.code, Outcome.INVALID)
        return cls(outcome, str(error), param=error.param)

    @property
    def status(self) -> int:
        return ERROR_TABLE[self.outcome].status

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Retry-After (whole seconds, rounded up) and x-should-retry, which the official clients obey; and the decision
        of admission, where it was admission that refused."""
        headers = [(b"x-should-retry", b"true" if self.should_retry else b"false")]
        if self.retry_after_s is not None:
            headers.append((b"retry-after", str(max(1, math.ceil(self.retry_after_s))).encode()))
        if self.numbers is not None:
            headers.append((ADMISSION_HEADER, admission_text("reject", str(self.outcome), self.numbers).encode()))
        if self.outcome is Outcome.UNAUTHORIZED:
            headers.append((b"www-authenticate", b"Bearer"))
        return headers

    def body(self) -> bytes:
        return msgspec.json.encode(self.document())

    def document(self) -> dict[str, Any]:
        """OpenAI's error object."""
        return {
            "error": {
                "message": self.message,
                "type": ERROR_TABLE[self.outcome].type,
                "param": self.param,
                "code": str(self.outcome),
            }
        }


def admission_text(action: str, reason: str, numbers: Mapping[str, float], changes: Sequence[str] = ()) -> str:
    """A decision as the client is told it: `downgrade; reason=long_output; changes=clamp:256,tier:flex; ...`."""
    parts = [action, f"reason={reason}"]
    if changes:
        parts.append("changes=" + ",".join(changes))
    if "predicted_ttft_ms" in numbers:
        parts.append(f"predicted_ttft_ms={numbers['predicted_ttft_ms']:.0f}")
    return "; ".join(parts)
