"""Workloads: who sends what, when, and what they expect. Pure and seeded; no HTTP, no tokenizer, no clock.

    Workload (a preset or a TOML file) + rate + duration + seed -> generate() -> [WorkItem], in order of arrival

The load generator turns items into HTTP requests, the simulator into Requests; so both serve the same work, and the
same seed gives the same work anywhere. Content is named, not written out: a Segment is (key, number of tokens), equal
keys are equal tokens, and content.py spells it in token ids or in words.

Owns: the specification (a contract: unknown keys are errors) and the drawing of items from it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from tidegate.bench.arrivals import Arrivals, ClosedArrivals, PoissonArrivals, arrival_times
from tidegate.config import Duration

_KEY_BITS = 62


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens. The first n tokens of two segments with one key are equal."""

    key: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One request as its client will send it.

    `arrival_s` counts from the start of the run; with a `parent` (the index of the turn before, whose prompt and answer
    are sent again in front of `content`) it counts from the end of the parent instead. With `client` (closed loop) it
    is the pause after that client's request before. `num_output_tokens` is what the client wants: it hangs up there
    when that is less than max_tokens.
    """

    index: int
    arrival_s: float
    content: tuple[Segment, ...]
    max_tokens: int
    num_output_tokens: int
    ignore_eos: bool
    length_class: str
    tenant: str = ""
    tier: str = ""
    api_key: str | None = None
    parent: int | None = None
    client: int | None = None
    session_id: str = ""

    @property
    def num_prompt_tokens(self) -> int:
        """Of this turn alone."""
        return sum(segment.num_tokens for segment in self.content)

    @property
    def hang_up_after(self) -> int | None:
        return self.num_output_tokens if self.num_output_tokens < self.max_tokens else None


class _Spec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class FixedLength(_Spec):
    kind: Literal["fixed"] = "fixed"
    tokens: int = Field(ge=1)

    def draw(self, rng: random.Random) -> int:
        return self.tokens


class UniformLength(_Spec):
    kind: Literal["uniform"] = "uniform"
    min: int = Field(ge=1)
    max: int = Field(ge=1)

    def draw(self, rng: random.Random) -> int:
        return rng.randint(min(self.min, self.max), max(self.min, self.max))


class LognormalLength(_Spec):
    """Cut off at min and max, not drawn again: the tails stay where the machine can still take them."""

    kind: Literal["lognormal"] = "lognormal"
    median: float = Field(ge=1)
    sigma: float = Field(ge=0)
    min: int = Field(1, ge=1)
    max: int = Field(1 << 20, ge=1)

    def draw(self, rng: random.Random) -> int:
        return max(self.min, min(self.max, round(rng.lognormvariate(math.log(self.median), self.sigma))))


Length = Annotated[FixedLength | UniformLength | LognormalLength, Field(discriminator="kind")]


class LengthClass(_Spec):
    """`max_tokens` given: it is what is sent, and the client hangs up after `output` tokens."""

    name: str = "all"
    share: float = Field(1.0, gt=0)
    prompt: Length
    output: Length
    max_tokens: int | None = Field(None, ge=1)
    ignore_eos: bool = True

    def draw_output(self, rng: random.Random) -> int:
        """Tokens that the client wants; never more than max_tokens."""
        num_tokens = self.output.draw(rng)
        return num_tokens if self.max_tokens is None else min(num_tokens, self.max_tokens)


class SharedPrefix(_Spec):
    """Prompts begin with one of `count` prefixes, drawn by Zipf's law, in addition to their own length.

    `share` of the prompts have one.
    """

    count: int = Field(1, ge=1)
    tokens: Length
    zipf: float = Field(1.0, ge=0)
    share: float = Field(1.0, ge=0, le=1)


class Conversations(_Spec):
    """Each arrival is a conversation; the next turn comes `think` (mean, exponential) after the answer."""

    turns: Length
    think: Duration = 5.0


class TenantSpec(_Spec):
    """`weight` is the share of the machine that it is entitled to, for the fairness figures."""

    name: str
    share: float = Field(1.0, gt=0)
    tier: str = ""
    api_key: str | None = None
    weight: float = Field(1.0, gt=0)
    classes: tuple[str, ...] = ()


class Workload(_Spec):
    """`format`: token ids and text go to /v1/completions, chat to /v1/chat/completions."""

    name: str = "own"
    format: Literal["tokens", "text", "chat"] = "tokens"
    arrivals: Arrivals = PoissonArrivals()
    classes: tuple[LengthClass, ...] = Field(min_length=1)
    shared_prefix: SharedPrefix | None = None
    conversations: Conversations | None = None
    tenants: tuple[TenantSpec, ...] = (TenantSpec(name=""),)
    retries: bool = False

    @property
    def tenant_weights(self) -> dict[str, float]:
        return {tenant.name: tenant.weight for tenant in self.tenants}


def generate(
    workload: Workload, rate: float, duration_s: float, seed: int | str, *, content_seed: int | str = ""
) -> list[WorkItem]:
    """The items of `duration_s` seconds at a mean of `rate` requests a second (a closed loop's rate is its own).

    Two seeds share no content. Another `content_seed` is the same work in other words: what a second run against one
    server needs, so that its cache does not know the prompts. Items with a parent stand behind it.
    """
    return list(_Generator(workload, seed, content_seed).items(rate, duration_s))


def unloaded_items(workload: Workload, seed: int | str, num_per_class: int) -> list[WorkItem]:
    """First turns of each length class in turn, to be sent one after another: what the machine can do at its best."""
    generator = _Generator(workload, seed)
    return [
        generator.item(place, 0.0, length_class)
        for place, length_class in enumerate(list(workload.classes) * num_per_class)
    ]


class _Generator:
    def __init__(self, workload: Workload, seed: int | str, content_seed: int | str = "") -> None:
        self._workload = workload
        self._classes = {one.name: one for one in workload.classes}
        # Streams of their own, so that another choice of lengths leaves the arrivals as they were.
        self._arrivals_rng = random.Random(f"{seed} arrivals")
        self._rng = random.Random(f"{seed} items")
        self._keys = random.Random(f"{seed} {content_seed} keys")
        shared = workload.shared_prefix
        self._prefixes = (
            [Segment(self._key(), shared.tokens.draw(self._rng)) for _ in range(shared.count)] if shared else []
        )
        self._prefix_shares = [(place + 1) ** -shared.zipf for place in range(shared.count)] if shared else []

    def items(self, rate: float, duration_s: float) -> Iterator[WorkItem]:
        arrivals = self._workload.arrivals
        if isinstance(arrivals, ClosedArrivals):
            yield from self._closed_loop(arrivals, duration_s)
            return
        conversations = self._workload.conversations
        if conversations is not None:
            rate /= self._mean_turns(conversations)
        index = 0
        for arrival_s in arrival_times(arrivals, rate, duration_s, self._arrivals_rng):
            first = self.item(index, arrival_s, self._draw_class())
            num_turns = conversations.turns.draw(self._rng) if conversations is not None else 1
            for turn in range(num_turns):
                yield first if turn == 0 else self._next_turn(first, index)
                index += 1

    def item(self, index: int, arrival_s: float, length_class: LengthClass, client: int | None = None) -> WorkItem:
        rng = self._rng
        tenants = [one for one in self._workload.tenants if not one.classes or length_class.name in one.classes]
        tenants = tenants or list(self._workload.tenants)
        tenant = rng.choices(tenants, [one.share for one in tenants])[0]
        content = [Segment(self._key(), length_class.prompt.draw(rng))]
        shared = self._workload.shared_prefix
        if shared is not None and rng.random() < shared.share:
            content.insert(0, rng.choices(self._prefixes, self._prefix_shares)[0])
        num_output_tokens = length_class.draw_output(rng)
        return WorkItem(
            index=index,
            arrival_s=arrival_s,
            content=tuple(content),
            max_tokens=length_class.max_tokens or num_output_tokens,
            num_output_tokens=num_output_tokens,
            ignore_eos=length_class.ignore_eos,
            length_class=length_class.name,
            tenant=tenant.name,
            tier=tenant.tier,
            api_key=tenant.api_key,
            client=client,
            session_id=f"{self._key():x}" if self._workload.conversations is not None else "",
        )

    def _next_turn(self, first: WorkItem, index: int) -> WorkItem:
        length_class = self._classes[first.length_class]
        conversations = self._workload.conversations
        assert conversations is not None
        num_output_tokens = length_class.draw_output(self._rng)
        return WorkItem(
            index=index,
            arrival_s=self._rng.expovariate(1.0) * conversations.think,
            content=(Segment(self._key(), length_class.prompt.draw(self._rng)),),
            max_tokens=length_class.max_tokens or num_output_tokens,
            num_output_tokens=num_output_tokens,
            ignore_eos=first.ignore_eos,
            length_class=first.length_class,
            tenant=first.tenant,
            tier=first.tier,
            api_key=first.api_key,
            parent=index - 1,
            session_id=first.session_id,
        )

    def _closed_loop(self, arrivals: ClosedArrivals, duration_s: float) -> Iterator[WorkItem]:
        """More items than the clients can get through: the run ends by its duration."""
        for index in range(int(arrivals.clients * (4 + duration_s * arrivals.max_rate_per_client))):
            pause_s = self._arrivals_rng.expovariate(1.0) * arrivals.think if arrivals.think else 0.0
            yield self.item(index, pause_s, self._draw_class(), client=index % arrivals.clients)

    def _draw_class(self) -> LengthClass:
        classes = self._workload.classes
        return self._rng.choices(classes, [one.share for one in classes])[0]

    def _key(self) -> int:
        return self._keys.getrandbits(_KEY_BITS)

    @staticmethod
    def _mean_turns(conversations: Conversations) -> float:
        """By drawing: a cut-off lognormal has no short formula."""
        rng = random.Random(0)
        return sum(conversations.turns.draw(rng) for _ in range(2_000)) / 2_000
