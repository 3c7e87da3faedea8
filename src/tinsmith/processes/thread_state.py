"""State that threads which compute at the same time each have for themselves."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

S = TypeVar("S")


class ThreadState(Generic[S]):
    """A state for each thread that asked for its own.

    Other threads read the last one that was asked for: PyTorch computes the backward of a GPU in a thread that it
    starts itself, and only one thread uses a GPU.
    """

    def __init__(self, make: Callable[[], S]) -> None:
        self._make = make
        self._of_thread = threading.local()
        self._last = make()

    @property
    def own(self) -> S:
        """The current thread's state, to change it."""
        state: S | None = getattr(self._of_thread, "state", None)
        if state is None:
            state = self._of_thread.state = self._make()
        self._last = state
        return state

    @property
    def now(self) -> S:
        """The state that holds in the current thread, to read it."""
        return getattr(self._of_thread, "state", self._last)
