"""Take, run, complete: one loop for each engine. It sleeps until there is something to do.

A request that fails says so in its own result and blocks nothing. When the engine dies, what was running stays
promised: the engine is started again, each model comes back through the journal when next needed, and the loop goes on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from tinsmith.engine.base import Pass, PassResult
from tinsmith.errors import BadRequest, EngineDied, EngineError, TinsmithError
from tinsmith.service.checkpoints import Checkpoints
from tinsmith.service.engines.host import DEATHS, EngineHost
from tinsmith.service.observability import metrics
from tinsmith.service.observability.audit import Chronicle
from tinsmith.service.observability.metrics import Telemetry
from tinsmith.service.results.futures import Futures
from tinsmith.service.storage.payloads import row_of, stored_kind
from tinsmith.service.storage.records import PROTOBUF, Answer, Drop, Model, Revive, Row, Work
from tinsmith.service.storage.store import Finished, Held, Store
from tinsmith.service.tenancy.quotas import Limits
from tinsmith.service.training.background_writes import Behind
from tinsmith.service.training.journal import Journal
from tinsmith.service.training.model_state import Line
from tinsmith.service.training.operations import Aftermath, Effects
from tinsmith.service.training.scheduler import next_batch
from tinsmith.service.wire.protobuf import encode_pass

log = logging.getLogger(__name__)


class Worker:
    """The loop of one engine."""

    def __init__(
        self,
        host: EngineHost,
        store: Store,
        futures: Futures,
        journal: Journal,
        checkpoints: Checkpoints,
        limits: Limits,
        batch_tokens: int,
        telemetry: Telemetry,
        chronicle: Chronicle,
    ) -> None:
        self.host = host
        self._store = store
        self._futures = futures
        self._journal = journal
        self._checkpoints = checkpoints
        self._behind = Behind(host, store, checkpoints)
        self._effects = Effects(store, checkpoints, journal, limits, self._behind)
        self._aftermath = Aftermath(host, store, checkpoints, journal, self._behind, chronicle)
        self._batch_tokens = batch_tokens
        self._telemetry = telemetry
        self._rows: dict[str, Row] = {}
        self._lines: dict[str, Line] = {}
        self._deaths: Counter[str] = Counter()
        self._order = 0
        self._wake = asyncio.Event()
        self._ending = False
        self._idle = asyncio.Event()
        self._idle.set()

    def line(self, model_id: str) -> Line:
        """The model's place, made when first asked for."""
        return self._lines.setdefault(model_id, Line())

    def is_broken(self, model_id: str) -> bool:
        """The living engine cannot have the model."""
        line = self._lines.get(model_id)
        return line is not None and line.broken is not None

    def row(self, request_id: str, owner: str, model_id: str, seq: int, work: Work) -> Row:
        """A row that stands behind all others."""
        self._order += 1
        return row_of(request_id, owner, model_id, seq, self._order, work)

    def add(self, row: Row) -> None:
        """Queue a row. Its promise is the caller's matter."""
        self._order = max(self._order, row.order)
        self._rows[row.id] = row
        if not isinstance(row.work, Drop | Revive):
            self._telemetry.accepted(row.id, row.owner, stored_kind(row.work), self.host.names[0])
        self._wake.set()

    def drop(self, model: Model) -> None:
        """End a model after all that waits for it."""
        self.add(self.row(f"{model.id}:drop", model.owner, model.id, 2**62, Drop()))

    async def revived(self, model: Model) -> None:
        """Wait until the living engine has the model."""
        line = self.line(model.id)
        if not line.warm.is_set():
            self.add(self.row(f"{model.id}:revive", model.owner, model.id, -1, Revive()))
            await line.warm.wait()
        if line.broken is not None:
            raise line.broken

    async def run(self) -> None:
        """For ever. The engine's first start is the caller's; later ones are made here."""
        last_owner = ""
        watch = self._watch()
        try:
            while True:
                if not self.host.is_up:
                    watch.cancel()
                    await self._start_again()
                    watch = self._watch()
                self._wake.clear()
                suspects = [row for row in self._rows.values() if row.alone]
                if not suspects:  # until then no sample can be blamed for their next death, nor they for a sample's
                    self.host.admit()
                rows = suspects or self._rows.values()
                batch = () if self._ending else next_batch(rows, self._batch_tokens, last_owner)
                if batch:
                    last_owner = batch[0].owner
                    self._idle.clear()
                    await self._attempt(batch)
                else:
                    self._idle.set()
                    await self._wake.wait()
        finally:
            watch.cancel()

    async def idle(self) -> None:
        """Begin no further batch, and wait until the one under way is done and its results are written."""
        self._ending = True
        self._wake.set()
        await self._idle.wait()

    async def close(self) -> None:
        """Abandon what is being written behind; a replay makes it again."""
        await self._behind.close()

    def _watch(self) -> asyncio.Task[None]:
        async def wake_when_dead() -> None:
            await self.host.died.wait()
            self._wake.set()

        return asyncio.create_task(wake_when_dead())

    async def _start_again(self) -> None:
        log.warning("The engine of %s died; starting it again.", self.host.config.source)
        await self.host.down()
        for line in self._lines.values():
            line.anew()
        await self.host.up_again()

    async def _attempt(self, batch: Sequence[Row]) -> None:
        ran: Sequence[Row] = ()
        try:
            ran = await self._warm(batch)
            if ran:
                await (self._run_passes(ran) if ran[0].packs else self._run_barrier(ran[0]))
        except EngineDied:
            await self.host.down()
            await self._suspect(batch, ran)
        except TinsmithError as error:
            await self._fail_all(batch, error)
        except Exception as error:  # a fault of ours, or of the disk: the rows fail, the loop goes on
            log.exception("Requests %s failed.", ", ".join(row.id for row in batch))
            await self.host.down()  # the engine may have done what no result tells of
            await self._fail_all(batch, EngineError(f"Internal error: {type(error).__name__}."))

    async def _warm(self, batch: Sequence[Row]) -> list[Row]:
        """The rows whose models the engine has, brought back if need be; rows of models that cannot be fail."""
        ready = []
        for row in batch:
            model, line = self._store.find(Model, row.model_id), self.line(row.model_id)
            if isinstance(row.work, Drop):
                ready.append(row)
                continue
            line.begun = max(line.begun, row.seq)
            if model is None or model.state == "failed":
                await self._fail(row, BadRequest(f"Model {row.model_id} could not be made.", "Create another."))
                continue
            if model.state == "live" and not line.warm.is_set():
                await self._revive(model, line)
            if line.broken is not None:
                await self._fail(row, line.broken)
                continue
            ready.append(row)
        return ready

    async def _revive(self, model: Model, line: Line) -> None:
        try:
            back = await self._journal.revive(model, self.host.engine)
        except EngineDied:
            line.killed(model.id)
            raise
        except TinsmithError as error:
            log.exception("Model %s cannot be brought back.", model.id)
            line.broken = EngineError(f"Model {model.id} cannot be brought back: {error}")
        else:
            line.updated, line.steps, line.deaths = back.updated, back.steps, 0
            for version in back.versions:
                self._behind.write(version)
        line.warm.set()

    async def _run_passes(self, batch: Sequence[Row]) -> None:
        works = [row.work for row in batch if isinstance(row.work, Pass)]
        self._telemetry.batch(self.host.names[0], [row.tokens for row in batch], self._batch_tokens)
        self._telemetry.taken(row.id for row in batch)
        results = await self.host.engine.run(works)
        self._telemetry.ran(row.id for row in batch)
        for work, result in zip(works, results, strict=True):
            if isinstance(result, PassResult) and (apart := metrics.of_pass(work, result)) is not None:
                self._telemetry.mismatch(self.host.names[0], apart)
        stamp = time.time_ns()
        ends = [
            Finished(row=row, answer=_answer(result), batch=stamp) for row, result in zip(batch, results, strict=True)
        ]
        await self._finish(ends)

    async def _run_barrier(self, row: Row) -> None:
        model = self._store.find(Model, row.model_id)
        assert model is not None
        if isinstance(row.work, Revive):
            self._rows.pop(row.id, None)
            self.line(row.model_id).warm.set()
            return
        if isinstance(row.work, Drop):
            await self.host.engine.drop(model.id)
            await self._journal.forget(model)
            self._rows.pop(row.id, None)
            self._lines.pop(row.model_id, Line()).warm.set()
            return
        self._telemetry.taken([row.id])
        try:
            done = await self._effects.perform(row, model, self.host.engine)
        except EngineDied:
            raise
        except TinsmithError as error:
            failed = replace(model, state="failed") if model.state == "pending" else model
            await self._fail(row, error, failed)
            return
        self._telemetry.ran([row.id])
        await self._finish([Finished(row=row, answer=done.answer)], *done.records)
        await self._aftermath.follow(row, done, self.line(row.model_id))

    async def _suspect(self, batch: Sequence[Row], ran: Sequence[Row]) -> None:
        """After a death: each row of the batch runs again by itself, before samples are let in, so that the next death
        shows who is at fault. One that kills again and again fails; `ran` are those that the engine was given."""
        for row in (row for row in batch if row.id in self._rows):
            self._rows[row.id] = replace(row, alone=True)
        for row in (row for row in ran if row.id in self._rows):
            self._deaths[row.id] += 1
            if self._deaths[row.id] >= DEATHS:
                error = EngineError(f"The engine died {DEATHS} times while it ran this request.", "Send fewer tokens.")
                await self._fail(row, error)

    async def _finish(self, ends: Sequence[Finished], *records: Held) -> None:
        """What the engine has done is written down, then told. Raises what is no TinsmithError if that cannot be."""
        try:
            await self._store.finish(ends, *records)
        except TinsmithError as error:
            raise ValueError(f"A result cannot be written: {error}") from error
        self._close(ends)

    async def _fail_all(self, batch: Sequence[Row], error: TinsmithError) -> None:
        for row in (row for row in batch if row.id in self._rows):
            await self._fail(row, error)

    async def _fail(self, row: Row, error: TinsmithError, *records: Model) -> None:
        if isinstance(row.work, Drop | Revive):
            self._rows.pop(row.id, None)
            self.line(row.model_id).warm.set()
            return
        end = Finished(row=row, answer=Answer.failure(error))
        await self._store.finish([end], *records)
        self._close([end])

    def _close(self, ends: Sequence[Finished]) -> None:
        for end in ends:
            self._rows.pop(end.row.id, None)
            self._deaths.pop(end.row.id, None)
            self._futures.keep(end.row.id, end.answer)
            done = isinstance(end.row.work, Pass) and not end.answer.failed
            tokens = {stored_kind(end.row.work): end.row.tokens} if done else None
            self._telemetry.closed(end.row.id, end.answer, tokens)


def _answer(result: PassResult | TinsmithError) -> Answer:
    if isinstance(result, EngineDied):
        raise result
    if isinstance(result, TinsmithError):
        return Answer.failure(result)
    return Answer(body=encode_pass(result), media=PROTOBUF)
