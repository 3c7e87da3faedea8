"""The durable store: SQLAlchemy over SQLite in the data folder, or over PostgreSQL.

What is small (sessions, models, sampling sessions, checkpoints) is held in memory as well, so reading it costs nothing;
requests' payloads and results are only in the database. Every method that writes is one transaction, and memory changes
only after its commit. One process owns the database.

SQLite runs in WAL with synchronous=FULL: what is committed survives the death of any process and a power cut.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, Table, and_, delete, func, select, update
from sqlalchemy import Row as SqlRow
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from tinsmith.engine.base import LoraSpec
from tinsmith.service.storage.database import (
    exclusive_access,
    migrate,
    open_engine,
    retry_while_unavailable,
    sync_engine_of,
    uninterrupted,
)
from tinsmith.service.storage.payloads import decode_operation, kind_of, queued_request
from tinsmith.service.storage.records import (
    Checkpoint,
    CustomLoss,
    FutureResult,
    Model,
    QueuedRequest,
    ReplayedRequest,
    SamplingSession,
    Session,
)
from tinsmith.service.storage.tables import CHECKPOINTS, CUSTOM_LOSSES, MODELS, REQUESTS, SAMPLERS, SESSIONS

StoredRecord = Session | Model | SamplingSession | Checkpoint | CustomLoss
RecordT = TypeVar("RecordT", Session, Model, SamplingSession, Checkpoint, CustomLoss)
TABLES: dict[type[StoredRecord], Table] = {
    Session: SESSIONS,
    Model: MODELS,
    SamplingSession: SAMPLERS,
    Checkpoint: CHECKPOINTS,
    CustomLoss: CUSTOM_LOSSES,
}
_INSERT: dict[str, Any] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}
"""The standard has no "or else" for an insert; these two have the same."""


def insert_into(db: AsyncConnection | Connection, table: Table) -> Any:
    """An insert that can say what happens to rows which are there."""
    return _INSERT[db.dialect.name](table)


def upsert_records(db: Connection, records: Iterable[StoredRecord]) -> None:
    """Records, new or changed."""
    for record in records:
        table = TABLES[type(record)]
        values = {field.name: _plain(getattr(record, field.name)) for field in fields(record)}
        db.execute(insert_into(db, table).values(values).on_conflict_do_update(index_elements=["id"], set_=values))


def record_from_row(kind: type[StoredRecord], found: SqlRow[Any]) -> StoredRecord:
    """The record in a row."""
    values = dict(found._mapping)
    if "lora" in values:
        values["lora"] = LoraSpec(**values["lora"])
    return kind(**values)


def _plain(value: Any) -> Any:
    return {field.name: getattr(value, field.name) for field in fields(value)} if isinstance(value, LoraSpec) else value


R = TypeVar("R")

MAX_QUERY_IDS = 10_000
"""Ids in one query: a database takes only so many parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRequest:
    """One request's end: its answer, and the pass it ran in."""

    request: QueuedRequest
    result: FutureResult
    batch: int = 0


class Store:
    """Made by `open_store`."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = self.database = engine
        self._direct = sync_engine_of(engine)
        self._writing = asyncio.Lock()
        self._held: dict[type[StoredRecord], dict[str, Any]] = {kind: {} for kind in TABLES}
        self._of_run: dict[str, dict[str, Checkpoint]] = {}
        """run -> its checkpoints by id: every save asks for names of one run."""

    async def load(self) -> None:
        """Read what is held in memory."""
        async with self._engine.connect() as db:
            for kind, table in TABLES.items():
                for found in await db.execute(select(table).order_by(table.c.created, table.c.id)):
                    self._keep([record_from_row(kind, found)])

    async def close(self) -> None:
        """Close the database."""
        self._direct.dispose()
        await self._engine.dispose()

    def find(self, kind: type[RecordT], key: str) -> RecordT | None:
        """The record, or None."""
        return self._held[kind].get(key)

    def all(self, kind: type[RecordT]) -> list[RecordT]:
        """Every record of a kind, oldest first."""
        return list(self._held[kind].values())

    def checkpoints_of_run(self, run: str) -> list[Checkpoint]:
        """A run's checkpoints, unnamed ones too, oldest first."""
        return list(self._of_run.get(run, {}).values())

    async def write(self, work: Callable[[Connection], R]) -> R:
        """A transaction on tables that are not held here. Raises while the database is away: nothing waits for it."""
        async with self._writing:
            return await self._attempt(work)

    async def put(self, *records: StoredRecord) -> None:
        """Write records, new or changed, together."""
        async with self._writing:
            await self._transaction(lambda db: upsert_records(db, records))
            self._keep(records)

    async def update(self, kind: type[RecordT], key: str, **changes: Any) -> RecordT | None:
        """The record as it is now, with changes; None if it is gone. For records that more than one task writes."""
        async with self._writing:
            held = self.find(kind, key)
            if held is None:
                return None
            held = replace(held, **changes)
            await self._transaction(lambda db: upsert_records(db, [held]))
            self._keep([held])
            return held

    async def remove(self, *records: StoredRecord) -> None:
        """Forget records."""

        def removed(db: Connection) -> None:
            for record in records:
                table = TABLES[type(record)]
                db.execute(delete(table).where(table.c.id == record.id))

        async with self._writing:
            await self._transaction(removed)
            for record in records:
                self._held[type(record)].pop(record.id, None)
                if isinstance(record, Checkpoint):
                    self._of_run.get(record.run, {}).pop(record.id, None)

    async def accept(self, row: QueuedRequest, payload: bytes, *records: StoredRecord) -> bool:
        """A request and its payload, with records that come into being by it. After this the promise may be given.

        False, and nothing is written, if a request of this id was accepted before.
        """
        values = {
            "id": row.id,
            "owner": row.owner,
            "model_id": row.model_id,
            "seq": row.seq,
            "kind": kind_of(row.operation),
            "created": time.time(),
            "state": "pending",
            "payload": payload,
            "batch": 0,
        }
        mine = False

        def accepted(db: Connection) -> bool:
            nonlocal mine
            fresh = insert_into(db, REQUESTS).values(values).on_conflict_do_nothing().returning(REQUESTS.c.id)
            # Not fresh and yet mine: written by a try whose end the database could not tell.
            mine = db.execute(fresh).first() is not None or mine
            if mine:
                upsert_records(db, records)
            return mine

        async with self._writing:
            if not await self._transaction(accepted):
                return False
            self._keep(records)
        return True

    async def finish(self, ends: Sequence[FinishedRequest], *records: StoredRecord) -> None:
        """Results of requests, with records that changed by them. The first result of a request stands."""

        def finished(db: Connection) -> None:
            for end in ends:
                values = {
                    "state": "failed" if end.result.failed else "done",
                    "batch": end.batch,
                    "done": time.time(),
                    "status": end.result.status,
                    "media": end.result.media,
                    "body": end.result.body,
                }
                waiting = and_(REQUESTS.c.id == end.request.id, REQUESTS.c.state == "pending")
                db.execute(update(REQUESTS).where(waiting).values(values))
            upsert_records(db, records)

        async with self._writing:
            await self._transaction(finished)
            self._keep(records)

    async def cover(self, model: Model) -> None:
        """The model with its newly captured state; requests which that state covers lose their payloads."""
        done = and_(REQUESTS.c.model_id == model.id, REQUESTS.c.seq <= model.covered, REQUESTS.c.state != "pending")

        def covered(db: Connection) -> None:
            upsert_records(db, [model])
            db.execute(update(REQUESTS).where(done).values(payload=None))

        async with self._writing:
            await self._transaction(covered)
            self._keep([model])

    async def result(self, request_id: str, owner: str) -> tuple[str, FutureResult | None] | None:
        """(state, answer) of a request, or None if there is none; the answer is None while pending and once too old."""
        found = select(REQUESTS).where(REQUESTS.c.id == request_id, REQUESTS.c.owner == owner)

        async def first() -> SqlRow[Any] | None:
            async with self._engine.connect() as db:
                return (await db.execute(found)).first()

        row = await retry_while_unavailable(self._engine, first)
        if row is None:
            return None
        if row.body is None:
            return row.state, None
        return row.state, FutureResult(status=row.status, media=row.media, body=row.body, failed=row.state == "failed")

    async def pending_requests(self) -> list[QueuedRequest]:
        """Requests that were promised and have no result, oldest first; `order` is their place."""
        async with self._engine.connect() as db:
            waiting = select(REQUESTS).where(REQUESTS.c.state == "pending").order_by(REQUESTS.c.created, REQUESTS.c.seq)
            found = (await db.execute(waiting)).all()
        rows = []
        for order, one in enumerate(found):
            work = decode_operation(one.kind, one.model_id, one.payload)
            rows.append(queued_request(one.id, one.owner, one.model_id, one.seq, order, work))
        return rows

    async def highest_seqs(self) -> dict[str, tuple[int, int]]:
        """model -> (highest seq_id accepted, highest seq_id with a result)."""
        finished = func.max(REQUESTS.c.seq).filter(REQUESTS.c.state != "pending")
        query = select(REQUESTS.c.model_id, func.max(REQUESTS.c.seq), finished).group_by(REQUESTS.c.model_id)
        async with self._engine.connect() as db:
            return {model: (top, done if done is not None else -1) for model, top, done in await db.execute(query)}

    async def requests_to_replay(self, model: Model) -> list[ReplayedRequest]:
        """What the model's captured state does not hold: finished requests after it, in order, without the failed.

        A `forward` leaves nothing in a model: among the passes that it was packed with it would keep them apart.
        """
        r = REQUESTS.c
        query = select(r.id, r.seq, r.kind, r.batch, r.payload).where(
            r.model_id == model.id, r.seq > model.covered, r.state == "done", r.kind != "forward"
        )
        async with self._engine.connect() as db:
            found = (await db.execute(query.order_by(r.seq))).all()
        return [
            ReplayedRequest(id=one.id, seq=one.seq, kind=one.kind, batch=one.batch, payload=one.payload)
            for one in found
        ]

    async def last_used(self, models: Sequence[Model]) -> list[float]:
        """When the last request of each came."""
        r = REQUESTS.c
        query = select(r.model_id, func.max(r.created)).group_by(r.model_id)
        last: dict[str, float | None] = {}
        async with self._engine.connect() as db:
            for start in range(0, len(models), MAX_QUERY_IDS):
                some = [model.id for model in models[start : start + MAX_QUERY_IDS]]
                last.update((model, when) for model, when in await db.execute(query.where(r.model_id.in_(some))))
        return [last.get(model.id) or model.used or model.created for model in models]

    async def prune(self, before: float, ended_models: Sequence[str]) -> None:
        """Results older than `before` go; of models that ended, the whole request."""
        old = and_(REQUESTS.c.state != "pending", REQUESTS.c.done < before)

        def pruned(db: Connection) -> None:
            db.execute(update(REQUESTS).where(old, REQUESTS.c.body.is_not(None)).values(body=None))
            for model in ended_models:
                db.execute(delete(REQUESTS).where(old, REQUESTS.c.model_id == model))

        async with self._writing:
            await self._transaction(pruned)

    async def _transaction(self, work: Callable[[Connection], R]) -> R:
        """All of it or nothing, however long it takes."""
        return await retry_while_unavailable(self._engine, lambda: self._attempt(work))

    async def _attempt(self, work: Callable[[Connection], R]) -> R:
        """In a thread; who is cancelled meanwhile waits for its end."""

        def run() -> R:
            with self._direct.begin() as db:
                return work(db)

        return await uninterrupted(asyncio.to_thread(run))

    def _keep(self, records: Iterable[StoredRecord]) -> None:
        for record in records:
            self._held[type(record)][record.id] = record
            if isinstance(record, Checkpoint):
                self._of_run.setdefault(record.run, {})[record.id] = record


async def open_store(data: Path, database: str | None = None) -> Store:
    """The store of a data folder, or of the database at a URL; made, or brought up to date, if need be."""
    return await _loaded(open_engine(data, database))


@asynccontextmanager
async def exclusive_store(data: Path, database: str | None) -> AsyncIterator[Store]:
    """The same for a server: it has the database to itself. Raises ConfigError if another server has."""
    engine = open_engine(data, database)
    try:
        async with exclusive_access(engine):
            store = await _loaded(engine)
            try:
                yield store
            finally:
                await store.close()
    finally:
        await engine.dispose()


async def _loaded(engine: AsyncEngine) -> Store:
    store = Store(engine)
    try:
        await migrate(engine)
        await store.load()
    except BaseException:
        await store.close()
        raise
    return store
