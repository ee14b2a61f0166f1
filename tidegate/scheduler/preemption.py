"""Who gives way when a running request needs a block and there is none: the lowest tier, then the newest."""

from __future__ import annotations

from collections.abc import Iterable

from tidegate.scheduler.state import RequestState


def choose_victim(running: Iterable[RequestState], needy: RequestState) -> RequestState:
    """The state that gives its blocks back so that `needy` can go on; `needy` itself if nobody is worse placed.

    A state that was preempted before and has produced nothing since is left alone, so that each one makes progress.
    It can never be the one in need: at admission it got the blocks for all it had and its next token.
    """
    victim = needy
    for state in running:
        if state.order > victim.order and (state.num_preemptions == 0 or state.num_since_resume > 0):
            victim = state
    return victim


def choose_lower_tier_victim(running: Iterable[RequestState], urgent: RequestState) -> RequestState | None:
    """The worst placed state of a lower tier than `urgent` that has made progress since it last gave way, or None."""
    victims = [
        state
        for state in running
        if state.order[0] > urgent.order[0] and (state.num_preemptions == 0 or state.num_since_resume > 0)
    ]
    return max(victims, key=lambda state: state.order, default=None)
