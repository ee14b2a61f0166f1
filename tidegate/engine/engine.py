"""One model replica: takes requests in, plans steps, and turns what a step computed into outputs.

    submit ─> waiting ─> schedule(now) ─> StepPlan ═ executor ═> StepResult ─> apply(result, now) ─> [RequestOutput]

Owns: the requests that are here and all they hold. Never: a clock, an executor, a socket: its shell (worker loop,
offline LLM or simulator) calls `schedule`, has the plan computed, and calls `apply` with the result.
Invariants: one plan in flight at most; a request's holds are released in Scheduler.finish, once, whichever way it ends;
free + cached + held blocks == all blocks after every call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tidegate.config import CacheConfig, SchedulerConfig
from tidegate.cost_model import CostModel
from tidegate.executor.base import ExecutorInfo
from tidegate.kv.audit import audit
from tidegate.kv.block_hash import root_hash
from tidegate.kv.block_pool import BlockPool
from tidegate.kv.sessions import BlockUser
from tidegate.metrics.load_snapshot import LoadReport
from tidegate.request import FinishReason, Phase, PrefillTimes, Request, RequestOutput, TokenLogprobs
from tidegate.scheduler.scheduler import Scheduler
from tidegate.scheduler.state import RequestState
from tidegate.scheduler.static_batching import StaticBatching, StaticScheduler
from tidegate.scheduler.step import StepPlan, StepResult, StepRow
from tidegate.scheduler.unchanged_steps import book_unchanged_steps, num_unchanged_steps


@dataclass(slots=True)
class _Live:
    """A request that is here: its choices that have not ended, and the prompt's log-probabilities so far."""

    request: Request
    states: list[RequestState]
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=lambda: [None])


class Engine:
    def __init__(
        self,
        info: ExecutorInfo,
        scheduler: SchedulerConfig,
        cache: CacheConfig,
        cost_model: CostModel | None = None,
        batching: StaticBatching | None = None,
    ) -> None:
        """`batching` is for comparisons; without it batching is continuous."""
        self.info = info
        self.cost_model = cost_model or CostModel()
        self.pool = BlockPool(info.num_blocks, cache.eviction)
        parts = (self.pool, info.block_size, scheduler, cache, self.cost_model)
        self.scheduler = StaticScheduler(*parts, batching) if batching is not None else Scheduler(*parts)
        self._live: dict[str, _Live] = {}
        self._roots: dict[str, bytes] = {}
        self._plan: StepPlan | None = None
        self._step_start_s = 0.0
        self._next_row_id = 0
        self._session_ttl_s = cache.session_ttl

    # The two verbs that Engine and Gate share.

    def submit(self, request: Request, now: float) -> list[RequestOutput]:
        """Take a request in. One that can never run, or whose id is in use, is answered at once with an error."""
        if problem := self._impossible(request):
            return [RequestOutput(request.request_id, 0, [], now, FinishReason.ERROR, error=problem)]
        row_id = self._new_row_id()
        state = RequestState(request, 0, row_id, row_id, self._root(request.namespace), self._user(request), now)
        self._live[request.request_id] = _Live(request, [state])
        self.scheduler.queue(state)
        return []

    def cancel(self, request_id: str, now: float) -> list[RequestOutput]:
        """End a request in whatever phase it is; its blocks are free for the next plan. Unknown ids do nothing."""
        live = self._live.get(request_id)
        if live is None:
            return []
        return [
            self._end(state, FinishReason.ABORT, RequestOutput(request_id, state.index, [], now), now)
            for state in list(live.states)
        ]

    # The step.

    def schedule(self, now: float) -> StepPlan | None:
        """What to compute next, or None. The caller must `apply` or `fail_step` before it asks again."""
        if self._plan is not None:
            raise RuntimeError("a step is in flight")
        plan = self.scheduler.schedule(now)
        if plan is not None:
            self._plan = plan
            self._step_start_s = now
            for state in self.scheduler.planned[plan.num_decode_rows :]:
                if state.scheduled_s < 0.0:
                    state.scheduled_s = now
        return plan

    def apply(self, result: StepResult, now: float) -> list[RequestOutput]:
        """Book what the plan in flight computed. Returns what each choice got."""
        plan = self._take_plan()
        self.cost_model.observe(
            plan.num_prefill_tokens, plan.num_decode_rows, plan.num_context_tokens, result.compute_s
        )
        outputs: list[RequestOutput] = []
        num_decode_rows = plan.num_decode_rows
        self._apply_decodes(result, num_decode_rows, now, outputs)
        next_sample = num_decode_rows
        prefills = zip(plan.rows[num_decode_rows:], self.scheduler.planned[num_decode_rows:], strict=True)
        for row, state in prefills:
            num_samples = len(row.samples)
            if state.phase is not Phase.FINISHED:
                self._apply_prefill(row, state, plan, result, next_sample, now, outputs)
            next_sample += num_samples
        return outputs

    def num_unchanged_steps(self, limit: int) -> int:
        """How often, from now on, the step in flight ends and an equal one follows; at most `limit`."""
        return 0 if self._plan is None else num_unchanged_steps(self.scheduler, self._plan, limit)

    def apply_unchanged(
        self, token_ids: Sequence[list[int]], ends_s: Sequence[float], compute_s: Sequence[float]
    ) -> list[RequestOutput]:
        """As `apply` and `schedule` for each of `ends_s` (ascending, at most num_unchanged_steps): the plan in flight,
        and those that follow it, have been computed, and the next one is in flight. `token_ids` holds each row's new
        tokens. Returns one output a row."""
        plan = self._plan
        if plan is None:
            raise RuntimeError("no step is in flight")
        num_rows, num_context_tokens = plan.num_decode_rows, plan.num_context_tokens
        for took_s in compute_s:
            self.cost_model.observe(0, num_rows, num_context_tokens, took_s)
            num_context_tokens += num_rows
        book_unchanged_steps(self.scheduler, plan, token_ids, ends_s)
        now = self._step_start_s = ends_s[-1]
        return [
            RequestOutput(state.request.request_id, state.index, row_ids, now)
            for state, row_ids in zip(self.scheduler.planned, token_ids, strict=True)
        ]

    def fail_step(self, message: str, now: float) -> list[RequestOutput]:
        """The plan in flight could not be computed: its requests end with an error, the others go on."""
        self._take_plan()
        failed = {state.request.request_id for state in self.scheduler.planned}
        return [
            self._end(state, FinishReason.ERROR, RequestOutput(request_id, state.index, [], now, error=message), now)
            for request_id in sorted(failed & self._live.keys())
            for state in list(self._live[request_id].states)
        ]

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    def load(self, now: float) -> LoadReport:
        scheduler, plan = self.scheduler, self._plan
        return LoadReport(
            time_s=now,
            num_running=scheduler.num_running,
            num_waiting=len(scheduler.waiting),
            num_waiting_tokens=scheduler.waiting.num_tokens
            + sum(state.num_uncomputed for state in scheduler.prefilling.values()),
            num_context_tokens=sum(state.num_computed for state in scheduler.decoding.values()),
            free_blocks=self.pool.num_free,
            cached_blocks=self.pool.num_cached,
            held_blocks=self.pool.num_held,
            step_start_s=self._step_start_s if plan else 0.0,
            step_prefill_tokens=plan.num_prefill_tokens if plan else 0,
            step_decode_rows=plan.num_decode_rows if plan else 0,
            prefill_left=self._prefill_left(plan),
            cache=self.pool.stats.life(self.pool.policy),
            num_paused=scheduler.long_decodes.num_paused,
            max_step_s=scheduler.max_step_s(now),
        )

    def _prefill_left(self, plan: StepPlan | None) -> dict[str, int]:
        left = {state.row_id: state.num_uncomputed for state in self.scheduler.prefilling.values()}
        for row in plan.rows[plan.num_decode_rows :] if plan else ():
            if row.row_id in left:
                left[row.row_id] -= len(row.token_ids)
        return {self.scheduler.prefilling[row_id].request.request_id: num_left for row_id, num_left in left.items()}

    def audit(self) -> None:
        """Raises AuditError when the books of the KV cache do not add up."""
        audit(self.pool, (state.block_ids for live in self._live.values() for state in live.states))

    # Booking.

    def _apply_decodes(self, result: StepResult, num_rows: int, now: float, outputs: list[RequestOutput]) -> None:
        """The decode rows come first in a plan and have one sample each. This runs once a token: keep it lean."""
        block_size, publish = self.info.block_size, self.scheduler.publish
        token_ids, logprobs = result.token_ids, result.logprobs
        for i, state in enumerate(self.scheduler.planned[:num_rows]):
            if state.phase is Phase.FINISHED:  # cancelled while the step ran
                continue
            state.num_computed += 1
            if state.num_computed % block_size == 0:
                publish(state, now)
            self._book_token(state, token_ids[i], logprobs[i] if logprobs is not None else None, now, outputs)

    def _apply_prefill(
        self,
        row: StepRow,
        state: RequestState,
        plan: StepPlan,
        result: StepResult,
        first_sample: int,
        now: float,
        outputs: list[RequestOutput],
    ) -> None:
        num_tokens = len(row.token_ids)
        state.num_computed += num_tokens
        self.scheduler.publish(state, now)
        if row.samples:
            self.scheduler.offer_tail(state)
        if state.first_token_s < 0.0:
            state.own_prefill_s += (now - self._step_start_s) * self._own_share(plan, num_tokens)
        if row.prompt_logprobs is not None and result.prompt_logprobs is not None:
            self._live[state.request.request_id].prompt_logprobs += result.prompt_logprobs.get(row.row_id, [])
        # With several samples, each one after the first starts a choice of its own.
        choices = [state, *(self._fork(state, index, now) for index in range(1, len(row.samples)))]
        for i, choice in enumerate(choices[: len(row.samples)], start=first_sample):
            logprobs = result.logprobs[i] if result.logprobs is not None else None
            if choice is state:
                self.scheduler.start_decoding(state)
            self._book_token(choice, result.token_ids[i], logprobs, now, outputs)

    def _own_share(self, plan: StepPlan, num_tokens: int) -> float:
        """Of the time of a step, the part that a prefill with `num_tokens` of its tokens would have taken alone."""
        cost = self.cost_model.cost
        others_s = cost.prefill_token_s * (plan.num_prefill_tokens - num_tokens)
        others_s += cost.decode_row_s * plan.num_decode_rows
        total_s = self.cost_model.predict(plan.num_prefill_tokens, plan.num_decode_rows, plan.num_context_tokens)
        return max(0.0, 1.0 - others_s / max(total_s, 1e-9))

    def _book_token(
        self,
        state: RequestState,
        token_id: int,
        logprobs: TokenLogprobs | None,
        now: float,
        outputs: list[RequestOutput],
    ) -> None:
        """One more token for a running state; it ends, goes on, or (a fork that found no room) waits."""
        state.token_ids.append(token_id)
        state.num_since_resume += 1
        if state.output_counts is not None:
            state.output_counts[token_id] = state.output_counts.get(token_id, 0) + 1
        output = RequestOutput(state.request.request_id, state.index, [token_id], now)
        outputs.append(output)
        if logprobs is not None:
            output.logprobs = [logprobs]
        if state.first_token_s < 0.0:
            self._first_token(state, output, now)
        if token_id in state.stop_token_ids and state.num_output_tokens > state.params.min_tokens:
            self._end(state, FinishReason.STOP, output, now)
        elif len(state.token_ids) >= state.max_total_tokens:
            self._end(state, FinishReason.LENGTH, output, now)
        elif not state.block_ids:
            state.phase = Phase.PREEMPTED
            self.scheduler.queue(state)

    def _first_token(self, state: RequestState, output: RequestOutput, now: float) -> None:
        state.first_token_s = now
        if state.index:
            return
        state.interference_s = max(0.0, now - state.scheduled_s - state.own_prefill_s)
        output.prefill = PrefillTimes(
            received_s=state.received_s,
            scheduled_s=state.scheduled_s,
            first_token_s=now,
            own_prefill_s=now - state.scheduled_s - state.interference_s,
            interference_s=state.interference_s,
            num_cached_tokens=state.num_cached_tokens,
        )
        if state.params.prompt_logprobs is not None:
            output.prompt_logprobs = self._live[state.request.request_id].prompt_logprobs

    def _fork(self, state: RequestState, index: int, now: float) -> RequestState:
        """Another choice of a request whose prompt has just been computed: it shares the full blocks and gets a copy
        of the partial one. Where slots or blocks are short it has no blocks yet, and will replay from the prefix."""
        scheduler, block_size = self.scheduler, self.info.block_size
        fork = state.fork(index, self._new_row_id())
        fork.phase = Phase.RUNNING
        self._live[state.request.request_id].states.append(fork)
        own = None
        if scheduler.num_running < scheduler.max_num_seqs and scheduler.may_grow(state):
            own = self.pool.allocate(1, now)  # the partial block's copy, or the next block
        if own is None:
            return fork
        num_full = state.num_computed // block_size
        shared = state.block_ids[:num_full]
        self.pool.share(shared)
        fork.block_ids = [*shared, *own]
        fork.num_computed = state.num_computed
        fork.num_published = state.num_published
        if state.num_computed % block_size:
            scheduler.block_copies.append((state.block_ids[num_full], own[0]))
        scheduler.join_decoding(fork)
        return fork

    def _end(self, state: RequestState, reason: FinishReason, output: RequestOutput, now: float) -> RequestOutput:
        """Release what a choice holds, and mark `output` as its last."""
        self.scheduler.finish(state, now)
        live = self._live[state.request.request_id]
        live.states.remove(state)
        if not live.states:
            del self._live[state.request.request_id]
        output.finish_reason = reason
        output.num_preemptions = state.num_preemptions
        return output

    def _impossible(self, request: Request) -> str:
        """Why the request can never run here, with its numbers; empty when it can."""
        if request.request_id in self._live:
            return f"request id {request.request_id} is already running"
        if not request.prompt_token_ids:
            return "the prompt has no tokens"
        total = request.max_total_tokens
        if total > self.info.max_model_len:
            return (
                f"prompt ({request.num_prompt_tokens} tokens) plus max_tokens ({request.max_tokens}) is {total}, "
                f"above the model's length of {self.info.max_model_len}"
            )
        num_blocks = -(-(total - 1) // self.info.block_size)  # the last token is never fed back
        allowed = self.scheduler.kv_shares.max_blocks(request) or self.info.num_blocks
        if num_blocks > allowed:
            return (
                f"prompt ({request.num_prompt_tokens} tokens) plus max_tokens ({request.max_tokens}) needs "
                f"{num_blocks} KV blocks; there are {allowed}"
            )
        return ""

    def _take_plan(self) -> StepPlan:
        plan, self._plan = self._plan, None
        if plan is None:
            raise RuntimeError("no step is in flight")
        return plan

    def _root(self, namespace: str) -> bytes:
        root = self._roots.get(namespace)
        if root is None:
            root = root_hash(self.info.weight_digest, self.info.kv_cache_dtype, namespace)
            self._roots[namespace] = root
        return root

    def _user(self, request: Request) -> BlockUser:
        max_blocks = self.scheduler.kv_shares.max_blocks(request)
        if not request.session_id:
            return BlockUser(request.request_id, request.priority, None, request.tenant, max_blocks)
        ttl_s = self._session_ttl_s if request.session_ttl_s is None else request.session_ttl_s
        name = f"{request.namespace}\x1f{request.session_id}"
        return BlockUser(name, request.priority, ttl_s, request.tenant, max_blocks)

    def _new_row_id(self) -> int:
        self._next_row_id += 1
        return self._next_row_id
