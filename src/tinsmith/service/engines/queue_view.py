"""What waits for an engine, as it is shown: each request's place, and the time until its result."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from tinsmith.plurals import counted

MEMORY_S = 60.0
"""Time after which a measured rate counts for little."""
VIEW_S = 1.0
"""Age of a view that polls read: thousands of them in one second read the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueEntry:
    """A request without a result."""

    request_id: str
    owner: str
    model_id: str
    """The model in training, or the sampling session."""
    kind: str
    tokens: int
    """Tokens to train, or cache tokens that its samples take."""
    running: bool
    waited_s: float
    """Seconds since this process accepted it."""
    place: int = 0
    """Number of requests before it."""
    tokens_before: int = 0
    """Tokens of the requests before it."""
    expected_s: float | None = None
    """Seconds until its result at the present rate; None while nothing was measured."""

    @property
    def description(self) -> str:
        """Its place and time left, for the client's user."""
        text = f"{counted(self.place, 'request')} ({counted(self.tokens_before, 'token')}) before this one"
        return text if self.expected_s is None else f"{text}, about {max(1, round(self.expected_s))} s"


def in_turn(entries: Iterable[QueueEntry], tokens_per_s: float | None) -> list[QueueEntry]:
    """Entries, which come in order of arrival, in the order in which they are expected to end.

    Owners are served equal tokens at a time, so a request ends when every other owner was served as much as its own.
    """
    served: Counter[str] = Counter()
    finish: list[tuple[int, QueueEntry]] = []
    for entry in entries:
        served[entry.owner] += entry.tokens
        finish.append((served[entry.owner], entry))
    placed, before = [], 0
    for place, (_, entry) in enumerate(sorted(finish, key=lambda pair: pair[0])):
        expected_s = (before + entry.tokens) / tokens_per_s if tokens_per_s else None
        placed.append(replace(entry, place=place, tokens_before=before, expected_s=expected_s))
        before += entry.tokens
    return placed


def reason_of_wait(entry: QueueEntry, entries: Iterable[QueueEntry]) -> str:
    """Why a request waits, by all `entries` of its queue: its place, and how many requests are of other tenants."""
    before = [other for other in entries if other is not entry and (other.running or other.place < entry.place)]
    others = sum(other.owner != entry.owner for other in before)
    text = f"number {len(before) + 1} in the queue"
    if others:
        text += f", after {counted(others, 'request')} of other tenants"
    return text if entry.expected_s is None else f"{text}, about {max(1, round(entry.expected_s))} s left"


class Throughput:
    """Tokens per second of the time in which something ran, over the last minutes."""

    def __init__(self) -> None:
        self._tokens = self._busy_s = self._now = 0.0
        self._running = 0

    def start(self, now: float) -> None:
        """A request has started at `now`, in seconds."""
        self._advance(now)
        self._running += 1

    def end(self, tokens: int, now: float) -> None:
        """A request has ended, and `tokens` of it were computed."""
        self._advance(now)
        self._running -= 1
        self._tokens += tokens

    @property
    def tokens_per_s(self) -> float | None:
        """The rate; None before anything was measured."""
        return self._tokens / self._busy_s if self._tokens and self._busy_s else None

    def _advance(self, now: float) -> None:
        passed = now - self._now
        self._now = now
        if self._running:
            fading = math.exp(-passed / MEMORY_S)
            self._tokens *= fading
            self._busy_s = self._busy_s * fading + passed


class QueueView:
    """The entries of a queue.

    `list_entries` gives them in order of arrival, for a time of the monotonic clock.
    """

    def __init__(self, list_entries: Callable[[float], Iterable[QueueEntry]], throughput: Throughput) -> None:
        self._list_entries, self._throughput = list_entries, throughput
        self._entries: dict[str, QueueEntry] = {}
        self._listed = -math.inf

    def entries(self) -> list[QueueEntry]:
        """All entries now, in the order in which they are expected to end."""
        now = time.monotonic()
        entries = in_turn(self._list_entries(now), self._throughput.tokens_per_s)
        self._entries, self._listed = {entry.request_id: entry for entry in entries}, now
        return entries

    def find(self, request_id: str) -> QueueEntry | None:
        """A request's entry at most VIEW_S ago; None if it had a result, or was not accepted yet."""
        if time.monotonic() - self._listed >= VIEW_S:
            self.entries()
        return self._entries.get(request_id)
