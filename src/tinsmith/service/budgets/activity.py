"""When sessions were last active: heartbeats, requests and polls, in memory."""

from __future__ import annotations

import time
from collections.abc import Callable

from tinsmith.service.storage.records import Session
from tinsmith.service.storage.store import Store

SILENT_S = 120.0
"""A client whose session was silent for this long has probably died: clients send a heartbeat every 10 s."""
ABANDONED_S = 600.0
"""The queued requests of a session that was silent for this long run after those of all others."""


class SessionActivity:
    """The sessions of a store, and when each was last active."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        self._store, self._clock = store, clock
        self._started = clock()
        self._seen: dict[str, float] = {}
        self._abandoned: frozenset[str] = frozenset()
        self._abandoned_at = 0.0

    @property
    def ids(self) -> list[str]:
        """The ids of the living sessions."""
        return list(self._seen)

    def touch(self, session_id: str) -> None:
        """The session is active now."""
        self._seen[session_id] = self._clock()

    def welcome(self, seen: float) -> None:
        """Take living sessions for active at `seen`, or later: clients could not reach a server that was down."""
        self._seen = {session.id: seen for session in self._store.all(Session) if session.ended is None}

    def forget(self, session_id: str) -> None:
        """Drop an ended session."""
        self._seen.pop(session_id, None)

    def last_seen(self, session: Session) -> float:
        """When the session was last active, in seconds since 1970."""
        return max(session.seen, self._seen.get(session.id, 0.0))

    def abandoned(self) -> frozenset[str]:
        """The living sessions that were not active for ABANDONED_S, as of a second ago."""
        now = self._clock()
        if now >= self._abandoned_at + 1:
            self._abandoned_at = now
            self._abandoned = frozenset(each for each in self._seen if self.is_silent(each, ABANDONED_S))
        return self._abandoned

    def is_silent(self, session_id: str, for_s: float) -> bool:
        """Whether a living session was not active for `for_s` seconds of this process."""
        session = self._store.find(Session, session_id)
        if session is None or session.ended is not None:
            return False
        return max(self._started, self.last_seen(session)) + for_s <= self._clock()
