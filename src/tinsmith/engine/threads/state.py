"""State that threads which compute at the same time each have for themselves."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

S = TypeVar("S")


class _Local(threading.local):
    state: Any = None


class ThreadState(Generic[S]):
    """A state for each thread that changes it.

    Other threads read the one that was changed last: PyTorch computes the backward of a GPU in a thread that it starts
    itself, and only one thread uses a GPU.
    """

    def __init__(self, make: Callable[[], S]) -> None:
        self._make = make
        self._local = _Local()
        self._last = make()

    @property
    def own(self) -> S:
        """The current thread's state, to change it."""
        if self._local.state is None:
            self._local.state = self._make()
        self._last: S = self._local.state
        return self._last

    @property
    def now(self) -> S:
        """The state that holds in the current thread, to read it."""
        state: S | None = self._local.state
        return self._last if state is None else state
