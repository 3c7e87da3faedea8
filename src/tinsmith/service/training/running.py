"""The groups of requests that run now, each in its own task."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from tinsmith.service.training.scheduler import Group


class RunningGroups:
    """Started groups that have not ended."""

    def __init__(self, wake: asyncio.Event) -> None:
        self._wake = wake
        """Set when a group has ended."""
        self._tasks: dict[asyncio.Task[None], Group] = {}

    @property
    def groups(self) -> list[Group]:
        """The groups, in the order of their start."""
        return list(self._tasks.values())

    @property
    def ids(self) -> set[str]:
        """The ids of the running requests."""
        return {request.id for group in self._tasks.values() for request in group}

    @property
    def models(self) -> set[str]:
        """The models of the running requests; a fork has two."""
        return {name for group in self._tasks.values() for each in group for name in (each.model_id, each.source)}

    def of_model(self, model_id: str) -> asyncio.Task[None] | None:
        """The task of the model's group that was started last; None if it runs nothing."""
        tasks = [task for task, group in self._tasks.items() if group[0].model_id == model_id]
        return tasks[-1] if tasks else None

    def start(self, group: Group, work: Coroutine[Any, Any, None]) -> None:
        """Run a group by `work`, which raises nothing."""
        task = asyncio.create_task(work)
        self._tasks[task] = group
        task.add_done_callback(self._end)

    async def finish(self) -> None:
        """Wait until no group runs."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def cancel(self) -> None:
        """Abandon what runs; its requests stay accepted."""
        for task in self._tasks:
            task.cancel()
        await self.finish()

    def _end(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        self._wake.set()
