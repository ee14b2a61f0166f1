"""Conversations and the blocks that are theirs alone: what ends when a conversation has been silent for too long.

    a block computed for a session ──another user hits it──> shared, never ends with one session
            └──── the session is silent for its time to live, nobody holds the block ────> given up

Owns: which published blocks belong to one session only, and when each session's time is up. Never: holders, free lists
or a clock (`now` comes with the step). Bounded by the blocks there are: a session without blocks is forgotten.
A session has one valid heap entry, moved lazily, so a step in which nothing is due looks at one number.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class BlockUser:
    """Who uses blocks: a conversation, or a single request (ttl_s None: its blocks do not expire).

    `name` is unique over namespaces. `priority` is its tier's rank (lower is more urgent). Of its tenant's blocks, what
    is beyond `max_blocks` leaves the cache first.
    """

    name: str
    priority: int = 0
    ttl_s: float | None = None
    tenant: str = ""
    max_blocks: int | None = None


@dataclass(slots=True)
class _Session:
    ttl_s: float
    deadline_s: float
    entry_s: float  # of its valid entry in the heap
    block_ids: dict[int, None] = field(default_factory=dict)


class Sessions:
    def __init__(self) -> None:
        self._sessions: dict[str, _Session] = {}
        self._owner: dict[int, str] = {}
        self._due: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._sessions)

    def own(self, block_id: int, user: BlockUser, now: float) -> None:
        """A block has been computed for `user`, who alone uses it so far."""
        if user.ttl_s is None:
            return
        session = self._sessions.get(user.name)
        if session is None:
            session = self._sessions[user.name] = _Session(user.ttl_s, now + user.ttl_s, now + user.ttl_s)
            heapq.heappush(self._due, (session.entry_s, user.name))
        session.block_ids[block_id] = None
        self._owner[block_id] = user.name
        self._touch(user.name, session, user.ttl_s, now)

    def used(self, block_id: int, user: BlockUser, now: float) -> None:
        """`user` holds the block (again)."""
        owner = self._owner.get(block_id)
        if owner is None:
            return
        if owner != user.name or user.ttl_s is None:
            self.disown(block_id)
        else:
            self._touch(owner, self._sessions[owner], user.ttl_s, now)

    def retired(self, block_id: int, now: float) -> None:
        """The block's last holder let go of it."""
        owner = self._owner.get(block_id)
        if owner is not None:
            session = self._sessions[owner]
            session.deadline_s = now + session.ttl_s

    def disown(self, block_id: int) -> None:
        """The block is shared now, or gone."""
        owner = self._owner.pop(block_id, None)
        if owner is None:
            return
        session = self._sessions[owner]
        del session.block_ids[block_id]
        if not session.block_ids:
            del self._sessions[owner]  # its heap entry is skipped when it comes up
            if len(self._due) > 64 + 4 * len(self._sessions):
                self._due = [(session.entry_s, name) for name, session in self._sessions.items()]
                heapq.heapify(self._due)

    @property
    def next_due_s(self) -> float:
        """Before this time take_due has nothing to do; infinity when there is no session."""
        return self._due[0][0] if self._due else math.inf

    def take_due(self, now: float) -> list[int]:
        """The blocks of a session whose time is up, in the order they were computed; empty when none is due. What of
        it is still in use then comes up again after another time to live."""
        while self._due and self._due[0][0] <= now:
            entry_s, name = heapq.heappop(self._due)
            session = self._sessions.get(name)
            if session is None or session.entry_s != entry_s:
                continue
            is_due = session.deadline_s <= now
            if is_due:
                session.deadline_s = now + session.ttl_s
            self._enter(name, session)
            if is_due:
                return list(session.block_ids)
        return []

    def _touch(self, name: str, session: _Session, ttl_s: float, now: float) -> None:
        session.ttl_s = ttl_s
        session.deadline_s = now + ttl_s
        if session.deadline_s < session.entry_s:  # a shorter time to live than before
            self._enter(name, session)

    def _enter(self, name: str, session: _Session) -> None:
        session.entry_s = session.deadline_s
        heapq.heappush(self._due, (session.deadline_s, name))
