"""An event loop in simulated time: the service's own coroutines run in it, and a wait costs nothing.

Nothing may wait for a socket, a thread or a process. When no callback is ready, the clock jumps to the next timer.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from typing_extensions import override

_Result = TypeVar("_Result")


class SimulatedLoop(asyncio.SelectorEventLoop):
    """Its `time()` is simulated seconds since its start."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_Jump(self))

    @override
    def time(self) -> float:
        return self.now


class _Jump(selectors.SelectSelector):
    """Advances the clock in place of waiting."""

    def __init__(self, loop: SimulatedLoop) -> None:
        super().__init__()
        self._loop = loop

    @override
    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("The simulation waits for something that nothing will do.")
        if timeout > 0:
            self._loop.now += timeout
        return []


def simulate(main: Coroutine[Any, Any, _Result]) -> _Result:
    """Run a coroutine in simulated time."""
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(main)


def now() -> float:
    """Simulated seconds, or seconds of the loop that runs."""
    return asyncio.get_running_loop().time()
