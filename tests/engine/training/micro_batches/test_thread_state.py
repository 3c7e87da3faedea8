"""A state for each thread that changes it."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from tinsmith.engine.threads.state import ThreadState


@dataclass
class State:
    value: int = 0


def in_a_thread(call):
    seen = []
    thread = threading.Thread(target=lambda: seen.append(call()))
    thread.start()
    thread.join()
    return seen[0]


def test_threads_that_change_it_have_their_own():
    state = ThreadState(State)
    state.own.value = 1

    def change() -> tuple[int, int]:
        before = state.own.value
        state.own.value = 2
        return before, state.now.value

    assert in_a_thread(change) == (0, 2)
    assert state.now.value == 1


def test_other_threads_read_the_last_one():
    """As autograd's threads, which compute the backward of a GPU."""
    state = ThreadState(State)
    assert state.now.value == 0
    state.own.value = 3
    assert in_a_thread(lambda: state.now.value) == 3
