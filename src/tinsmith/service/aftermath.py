"""What follows from a barrier once it is answered: versions are written, old names go, states are captured.

Nothing here can undo the answer. What fails is logged and made up for: a state by the next step, a folder at the start.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace

from tinsmith.errors import EngineDied
from tinsmith.service.behind import Behind
from tinsmith.service.checkpoints import Checkpoints
from tinsmith.service.effects import Done
from tinsmith.service.engines import EngineHost
from tinsmith.service.journal import Journal
from tinsmith.service.line import Line
from tinsmith.service.observe.chronicle import Chronicle
from tinsmith.service.records import Checkpoint, Load, Model, Row, SaveState, Step
from tinsmith.service.store import Store

log = logging.getLogger(__name__)


class Aftermath:
    """Of one engine's barriers."""

    def __init__(
        self,
        host: EngineHost,
        store: Store,
        checkpoints: Checkpoints,
        journal: Journal,
        behind: Behind,
        chronicle: Chronicle,
    ) -> None:
        self._host = host
        self._store = store
        self._checkpoints = checkpoints
        self._journal = journal
        self._behind = behind
        self._chronicle = chronicle

    async def follow(self, row: Row, done: Done, line: Line) -> None:
        """Do what is still to be done. Raises EngineDied alone."""
        line.warm.set()
        if done.behind is not None:
            self._behind.write(done.behind)
        if isinstance(row.work, Load):
            line.updated, line.steps = row.seq, 0
        elif isinstance(row.work, Step):
            line.updated, line.steps = row.seq, line.steps + 1
        for one in (one for one in done.records if isinstance(one, Checkpoint) and one.kind != "ephemeral"):
            if one.deleted:
                self._chronicle.changed(one, "checkpoint_overwritten", row.owner)
            else:
                self._chronicle.made(one, row.owner)
        await self._tried(row, lambda: self._forget(done))
        await self._tried(row, lambda: self._capture(row, done, line))

    async def _tried(self, row: Row, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except EngineDied:
            raise
        except Exception:  # the request is done whatever becomes of this
            log.exception("What follows from request %s could not be done.", row.id)

    async def _forget(self, done: Done) -> None:
        if done.replaced is not None:
            await self._checkpoints.delete(done.replaced)
            if self._store.find(Checkpoint, done.replaced.id) is None:
                await self._host.detach(done.replaced.id)

    async def _capture(self, row: Row, done: Done, line: Line) -> None:
        """A state that is on disk anyway, or one more after many steps. What fails is tried again after the next."""
        model = self._store.find(Model, row.model_id)
        assert model is not None
        if isinstance(row.work, Load):
            await self._journal.adopt(model)
        elif self._behind.owes(model):
            return
        elif isinstance(row.work, Step) and line.steps >= self._journal.every:
            await self._journal.capture(model, line.updated, self._host.engine)
            line.steps = 0
        elif isinstance(row.work, SaveState):
            [made] = [one for one in done.records if isinstance(one, Checkpoint) and not one.deleted]
            linked = await self._journal.link(model, self._checkpoints.folder(made.id), line.updated)
            await self._journal.adopt(replace(model, captured=linked, captured_optimizer=True, covered=line.updated))
            line.steps = 0
