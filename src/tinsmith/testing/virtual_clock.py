"""An event loop whose clock jumps to the next timer: hours of waiting pass at once, in the order of real time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector(selectors.DefaultSelector):
    """Advances `now` in place of waiting."""

    now = 0.0

    def select(self, timeout: float | None = None):
        events = super().select(0)
        if not events and timeout is None:
            raise RuntimeError("deadlock: nothing is scheduled")
        if not events:
            self.now += max(0.0, timeout or 0.0)
        return events


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


class _ThreadlessLoop(_VirtualLoop):
    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        """Calls the function at once, so that its end does not depend on real time."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001  as an executor does
            future.set_exception(error)
        return future


def run_virtually(main: Coroutine[Any, Any, T], *, threads: bool = True) -> T:
    """Run `main` like asyncio.run, on a virtual clock that begins at 0; without `threads`, calls of threads are made in
    the loop itself."""
    with asyncio.Runner(loop_factory=_VirtualLoop if threads else _ThreadlessLoop) as runner:
        return runner.run(main)
