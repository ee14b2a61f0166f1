"""RequestState: one choice of a request as the engine sees it, from intake to its last token.

    tokens:   [ prompt ............ | output .... ]
              [ computed (in KV) ....... | to come ]     len(token_ids) - num_computed tokens are to be computed
    blocks:   [b0][b1][b2][b3][b4]                       block_ids; the first num_published are in the prefix cache

A state decodes when exactly one token is to be computed; until then it prefills (its prompt, or a replay after it was
preempted). `order` is its place, kept for life: (rank of its tier, and in it whether it borrows its slot; the gate's
key; arrival at this engine; choice).
"""

from __future__ import annotations

from tidegate.kv.sessions import BlockUser
from tidegate.request import Phase, Request, SamplingParams


class RequestState:
    __slots__ = (
        "block_hashes",
        "block_ids",
        "first_token_s",
        "index",
        "interference_s",
        "max_total_tokens",
        "num_cached_tokens",
        "num_computed",
        "num_once_computed",
        "num_preemptions",
        "num_prompt_tokens",
        "num_published",
        "num_since_resume",
        "order",
        "output_counts",
        "own_prefill_s",
        "params",
        "phase",
        "received_s",
        "request",
        "root_hash",
        "row_id",
        "scheduled_s",
        "seed",
        "stop_token_ids",
        "token_ids",
        "tpot_slo_s",
        "user",
        "was_delayed",
    )

    def __init__(
        self,
        request: Request,
        index: int,
        row_id: int,
        arrival_id: int,
        root_hash: bytes,
        user: BlockUser,
        now: float,
    ) -> None:
        self.request = request
        self.index = index
        self.row_id = row_id
        self.root_hash = root_hash
        self.order = (2 * request.priority + request.is_borrowing, request.order_key, arrival_id, index)
        self.tpot_slo_s = request.tpot_slo_s
        self.params: SamplingParams = request.params
        self.seed = request.seed + index
        self.user = user
        self.was_delayed = False
        self.stop_token_ids = frozenset(request.stop_token_ids)
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.max_total_tokens = request.max_total_tokens
        self.output_counts: dict[int, int] | None = {} if request.params.needs_history else None
        self.num_computed = 0
        self.block_ids: list[int] = []
        self.block_hashes: list[bytes] = []
        self.num_published = 0
        self.phase = Phase.DISPATCHED
        self.num_cached_tokens = -1  # not known before the first admission
        self.num_preemptions = 0
        self.num_once_computed = 0  # when it was last preempted; what is computed again up to here is a replay
        self.num_since_resume = 0
        self.received_s = now
        self.scheduled_s = -1.0
        self.first_token_s = -1.0
        self.own_prefill_s = 0.0
        self.interference_s = 0.0

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) - self.num_computed

    def fork(self, index: int, row_id: int) -> RequestState:
        """Another choice of the same request, with the same prompt and no output yet. Takes no blocks."""
        other = RequestState(self.request, index, row_id, self.order[2], self.root_hash, self.user, self.received_s)
        other.block_hashes = self.block_hashes[: self.num_published]
        other.num_cached_tokens = self.num_cached_tokens
        other.scheduled_s = self.scheduled_s
        return other
