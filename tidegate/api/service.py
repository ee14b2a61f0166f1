"""What the api needs of everything behind it: a Service, which takes Requests and streams their outputs.

Owns: the protocols and plain data between the api and the frontend. All of it lives on one event loop; no call blocks.
Never does: HTTP, text. The api tokenizes before submit and detokenizes what comes back.

    api                                        service
     │ submit(request) ─────────────────────────> │   Refused at once, or
     │ <─ list[RequestOutput], as they come ───── │   Refused from the stream (expired in the queue, no worker left)
     │ record(id, tokenized_s / first_byte_s) ──> │
     │ close() ─────────────────────────────────> │   releases everything, in whatever phase the request is
     │ record(id, outcome) ─────────────────────> │
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from tidegate.api.errors import Outcome, Refused
from tidegate.request import Request, RequestOutput

if TYPE_CHECKING:
    from tidegate.text.chat_template import ChatTemplate
    from tidegate.text.tokenizer import Tokenizer

__all__ = ["Health", "HealthReason", "Outcome", "OutputStream", "Refused", "Served", "ServedModel", "Service"]

HealthReason = Literal["loading", "ready", "draining", "stalled", "no_workers"]


@dataclass(frozen=True, slots=True)
class Health:
    """Whether new requests are taken and answered. `ready` is True for the reason "ready" only."""

    reason: HealthReason
    detail: str = ""

    @property
    def ready(self) -> bool:
        return self.reason == "ready"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model as clients see it. `name` is served; `aliases` (with "default") are also understood.

    `max_model_len`: most tokens of prompt plus answer. `num_blocks` * `block_size` tokens of KV are all there are.
    `namespace` roots the block hashes. `created` is in Unix seconds.
    """

    name: str
    max_model_len: int
    vocab_size: int
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    eos_token_ids: tuple[int, ...]
    block_size: int
    num_blocks: int
    created: int
    aliases: tuple[str, ...] = ("default",)
    namespace: str = ""
    details: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Served:
    """How a request is served, as its client is told. `tier`: the one it is served in. `decision`: of admission, as in
    errors.admission_text. `is_clamped`: it gets fewer tokens than it asked for."""

    tier: str
    decision: str
    is_clamped: bool = False


class OutputStream(Protocol):
    """The outputs of one request, in order. Each step of the iteration yields all outputs that are there by then.

    Ends after the last choice's finish_reason. Raises Refused, also before the first output. `close` before the end
    cancels the request everywhere; it is idempotent, and makes a waiting __anext__ end the iteration.
    """

    @property
    def served(self) -> Served | None:
        """What admission has made of the request so far: it may still change while the request waits, and no more once
        it has an output. None where nobody decides."""
        return None

    def __aiter__(self) -> OutputStream: ...

    async def __anext__(self) -> list[RequestOutput]: ...

    def close(self) -> None: ...


class Service(Protocol):
    """Serves Requests. Methods are called on the event loop and return at once."""

    @property
    def model(self) -> ServedModel | None:
        """None while loading."""
        ...

    @property
    def tier_names(self) -> Sequence[str]:
        """The service tiers that a request may ask for, `default` among them."""
        ...

    def submit(self, request: Request) -> OutputStream:
        """Raises Refused when the request is refused at once."""
        ...

    def refuse_early(self, request: Request) -> None:
        """Raises Refused when a request with at least this prompt would be refused now. The prompt's tokens are not
        known yet: only their least number counts, and whatever they are, submit comes after."""
        ...

    def health(self) -> Health: ...

    def timeline(self, request_id: str) -> dict[str, Any] | None:
        """The request's timeline with each part of its TTFT, ready for JSON; None when it is not known (any more)."""
        ...

    def record(
        self,
        request_id: str,
        *,
        tokenized_s: float | None = None,
        first_byte_s: float | None = None,
        outcome: Outcome | None = None,
    ) -> None:
        """What only the api knows of a request (monotonic seconds): its prompt tokenized (called right after submit,
        before control goes back to the event loop), the first byte of its answer handed to the socket, and last, once,
        how it ended as the client sees it (STOP also for a stop string, after which the stream was closed).

        A request refused before submit is recorded with its outcome only: its id is unknown, it counts all the same.
        """
        ...
