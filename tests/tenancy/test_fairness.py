"""Virtual token counters: the paper's bound, weights, newcomers, work conservation."""

from __future__ import annotations

import random
from collections import defaultdict, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.tenancy.fairness import TokenCounters

Lengths = tuple[int, int]
"""Prompt and output tokens of a request."""


class Server:
    """Slots that are handed out by counters; every running request gets a token a step. Records the service."""

    def __init__(self, counters: TokenCounters, num_slots: int) -> None:
        self.counters = counters
        self.waiting: dict[str, deque[Lengths]] = defaultdict(deque)
        self.running: list[list[object]] = []
        self.served: dict[str, float] = defaultdict(float)
        self._num_slots = num_slots

    def arrive(self, tenant: str, lengths: Lengths) -> None:
        self.waiting[tenant].append(lengths)
        self.counters.begin_to_wait(tenant)

    def step(self) -> None:
        while len(self.running) < self._num_slots and (names := [name for name, line in self.waiting.items() if line]):
            tenant = min(names, key=self.counters.counter)
            assert self.counters.counter(tenant) == self.counters.least()
            num_prompt, num_output = self.waiting[tenant].popleft()
            self._serve(tenant, num_prompt, 0)
            if not self.waiting[tenant]:
                self.counters.end_to_wait(tenant)
            self.running.append([tenant, num_output])
        for entry in self.running:
            self._serve(str(entry[0]), 0, 1)
            entry[1] = int(str(entry[1])) - 1
        self.running = [entry for entry in self.running if entry[1]]

    def _serve(self, tenant: str, num_prompt: int, num_output: int) -> None:
        self.counters.charge(tenant, num_prompt, num_output)
        self.served[tenant] += num_prompt + self.counters.output_price * num_output


lengths = st.tuples(st.integers(1, 60), st.integers(1, 30))


@settings(max_examples=60, deadline=None)
@given(
    num_slots=st.integers(1, 6),
    of_a=st.lists(lengths, min_size=1, max_size=8),
    of_b=st.lists(lengths, min_size=1, max_size=8),
    third=st.lists(st.tuples(st.integers(0, 250), lengths), max_size=12),
    credit=st.sampled_from([0.0, 50.0, 400.0]),
    weight=st.sampled_from([1.0, 3.0]),
)
def test_the_service_of_two_backlogged_tenants_differs_by_no_more_than_the_bound(
    num_slots: int,
    of_a: list[Lengths],
    of_b: list[Lengths],
    third: list[tuple[int, Lengths]],
    credit: float,
    weight: float,
) -> None:
    """Over any time in which both always wait, whatever a third tenant does: 2 x (price x M + credit), by weight."""
    server = Server(TokenCounters({"a": weight}, credit=credit), num_slots)
    longest = max((p + o for p, o in (*of_a, *of_b, *(one for _, one in third))), default=0)
    bound = 2 * (server.counters.output_price * num_slots * longest + credit)
    gaps = []
    for step in range(300):
        for tenant, kinds in (("a", of_a), ("b", of_b)):
            while len(server.waiting[tenant]) < num_slots + 1:
                server.arrive(tenant, kinds[(step + len(server.waiting[tenant])) % len(kinds)])
        for at, one in third:
            if at == step:
                server.arrive("c", one)
        server.step()
        gaps.append(server.served["a"] / weight - server.served["b"])
    assert max(gaps) - min(gaps) <= bound


def test_weights_are_kept_in_the_long_run() -> None:
    rng = random.Random(1)
    server = Server(TokenCounters({"a": 3.0}), 8)
    for _ in range(4000):
        for tenant in "ab":
            while len(server.waiting[tenant]) < 12:
                server.arrive(tenant, (rng.randint(1, 300), rng.randint(1, 60)))
        server.step()
    assert server.served["a"] / server.served["b"] == pytest.approx(3.0, rel=0.05)


def test_idleness_is_not_saved_up() -> None:
    counters = TokenCounters({})
    counters.begin_to_wait("busy")
    counters.charge("busy", 1_000, 0)
    assert counters.counter("new") == 1_000
    counters.begin_to_wait("new")
    counters.charge("new", 10, 0)
    assert counters.least() == 1_000
    counters.end_to_wait("busy")
    counters.end_to_wait("new")
    assert counters.counter("later") == 1_010, "those who waited last have set the mark"


def test_a_tenant_that_uses_little_keeps_a_credit_and_no_more_than_that() -> None:
    counters = TokenCounters({}, credit=100.0)
    counters.begin_to_wait("busy")
    counters.charge("busy", 1_000, 0)
    assert counters.counter("quiet") == 900
    counters.begin_to_wait("quiet")
    counters.charge("quiet", 50, 0)
    assert counters.least() == 950


def test_output_costs_more_than_prompt_and_cached_prompt_nothing() -> None:
    counters = TokenCounters({"heavy": 2.0}, prompt_price=1.0, output_price=2.0)
    counters.charge("a", 100, 10)
    counters.charge("a", -64, 0)
    counters.charge("heavy", 100, 10)
    assert counters.counter("a") == 56
    assert counters.counter("heavy") == 60


def test_the_least_is_found_whatever_was_given_back() -> None:
    rng = random.Random(2)
    counters = TokenCounters({})
    names = [f"t{i}" for i in range(20)]
    waiting: set[str] = set()
    for _ in range(3000):
        name = rng.choice(names)
        what = rng.random()
        if what < 0.3:
            counters.begin_to_wait(name)
            waiting.add(name)
        elif what < 0.5:
            counters.end_to_wait(name)
            waiting.discard(name)
        else:
            counters.charge(name, rng.randint(-50, 100), rng.randint(0, 5))
        assert counters.least() == min((counters.counter(one) for one in waiting), default=None)
