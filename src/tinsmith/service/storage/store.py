"""The durable store: records, requests and results in SQLite or PostgreSQL.

Small records (sessions, models, sampling sessions, checkpoints, custom losses) are also held in memory, so reading them
costs nothing; payloads and results of requests are only in the database. Every method that writes is one transaction,
and memory changes only after its commit. One process owns the database.

A record is a row of its table, with a column for each field; a LoraSpec is JSON.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, Row, Table, and_, delete, func, select, update
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
MAX_QUERY_IDS = 10_000
"""Ids in one query: databases limit the number of parameters."""
_INSERT: dict[str, Any] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}
"""Standard SQL has no upsert; these two databases have the same one."""
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRequest:
    """A request with its result. Requests of one `batch` ran together."""

    request: QueuedRequest
    result: FutureResult
    batch: int = 0


class Store:
    """The records and requests of one database. Made by `open_store` and `exclusive_store`."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = self.database = engine
        self._sync_engine = sync_engine_of(engine)
        self._writing = asyncio.Lock()
        self._records: dict[type[StoredRecord], dict[str, Any]] = {kind: {} for kind in TABLES}
        self._by_run: dict[str, dict[str, Checkpoint]] = {}
        """Run -> its checkpoints by id: every save looks up names of one run."""

    async def load(self) -> None:
        """Read all records into memory."""
        async with self._engine.connect() as db:
            for kind, table in TABLES.items():
                for row in await db.execute(select(table).order_by(table.c.created, table.c.id)):
                    self._keep([record_from_row(kind, row)])

    async def close(self) -> None:
        """Close the connections."""
        self._sync_engine.dispose()
        await self._engine.dispose()

    # Records.

    def find(self, kind: type[RecordT], key: str) -> RecordT | None:
        """The record with this id, or None."""
        return self._records[kind].get(key)

    def all(self, kind: type[RecordT]) -> list[RecordT]:
        """All records of a kind, oldest first."""
        return list(self._records[kind].values())

    def checkpoints_of_run(self, run: str) -> list[Checkpoint]:
        """A run's checkpoints, unnamed ones included, oldest first."""
        return list(self._by_run.get(run, {}).values())

    async def put(self, *records: StoredRecord) -> None:
        """Insert or replace records in one transaction."""
        async with self._writing:
            await self._transaction(lambda db: upsert_records(db, records))
            self._keep(records)

    async def update(self, kind: type[RecordT], key: str, **changes: Any) -> RecordT | None:
        """Change fields of a record and return it; None if it is gone. For records that several tasks write."""
        async with self._writing:
            record = self.find(kind, key)
            if record is None:
                return None
            record = replace(record, **changes)
            await self._transaction(lambda db: upsert_records(db, [record]))
            self._keep([record])
            return record

    async def remove(self, *records: StoredRecord) -> None:
        """Delete records."""

        def delete_all(db: Connection) -> None:
            for record in records:
                table = TABLES[type(record)]
                db.execute(delete(table).where(table.c.id == record.id))

        async with self._writing:
            await self._transaction(delete_all)
            for record in records:
                self._records[type(record)].pop(record.id, None)
                if isinstance(record, Checkpoint):
                    self._by_run.get(record.run, {}).pop(record.id, None)

    # Requests.

    async def accept(self, request: QueuedRequest, payload: bytes, *records: StoredRecord) -> bool:
        """Store a request and its payload, with the records that it creates. Its result may be promised after this.

        False, and nothing is stored, if a request with this id was accepted before.
        """
        values = {
            "id": request.id,
            "owner": request.owner,
            "model_id": request.model_id,
            "seq": request.seq,
            "kind": kind_of(request.operation),
            "created": time.time(),
            "state": "pending",
            "payload": payload,
            "batch": 0,
        }
        inserted = False

        def insert(db: Connection) -> bool:
            nonlocal inserted
            statement = insert_into(db, REQUESTS).values(values).on_conflict_do_nothing().returning(REQUESTS.c.id)
            # A conflict after an earlier attempt is with this request: the database could not report that it committed.
            inserted = db.execute(statement).first() is not None or inserted
            if inserted:
                upsert_records(db, records)
            return inserted

        async with self._writing:
            if not await self._transaction(insert):
                return False
            self._keep(records)
        return True

    async def finish(self, finished: Sequence[FinishedRequest], *records: StoredRecord) -> None:
        """Store results, with the records that the requests changed. The first result of a request stays."""

        def store_results(db: Connection) -> None:
            for end in finished:
                values = {
                    "state": "failed" if end.result.failed else "done",
                    "batch": end.batch,
                    "done": time.time(),
                    "status": end.result.status,
                    "media": end.result.media,
                    "body": end.result.body,
                }
                pending = and_(REQUESTS.c.id == end.request.id, REQUESTS.c.state == "pending")
                db.execute(update(REQUESTS).where(pending).values(values))
            upsert_records(db, records)

        async with self._writing:
            await self._transaction(store_results)
            self._keep(records)

    async def cover(self, model: Model) -> None:
        """Store a model with a newly captured state, and delete the payloads of the requests that it covers."""
        covered = and_(REQUESTS.c.model_id == model.id, REQUESTS.c.seq <= model.covered, REQUESTS.c.state != "pending")

        def cover_requests(db: Connection) -> None:
            upsert_records(db, [model])
            db.execute(update(REQUESTS).where(covered).values(payload=None))

        async with self._writing:
            await self._transaction(cover_requests)
            self._keep([model])

    async def prune(self, before: float, ended_models: Sequence[str]) -> None:
        """Delete results older than `before`, and all old requests of ended models."""
        old = and_(REQUESTS.c.state != "pending", REQUESTS.c.done < before)

        def delete_old(db: Connection) -> None:
            db.execute(update(REQUESTS).where(old, REQUESTS.c.body.is_not(None)).values(body=None))
            for model in ended_models:
                db.execute(delete(REQUESTS).where(old, REQUESTS.c.model_id == model))

        async with self._writing:
            await self._transaction(delete_old)

    async def result(self, request_id: str, owner: str) -> tuple[str, FutureResult | None] | None:
        """(state, result) of a request, or None if there is no such request. A pending or pruned result is None."""
        query = select(REQUESTS).where(REQUESTS.c.id == request_id, REQUESTS.c.owner == owner)

        async def read() -> Row[Any] | None:
            async with self._engine.connect() as db:
                return (await db.execute(query)).first()

        row = await retry_while_unavailable(self._engine, read)
        if row is None:
            return None
        if row.body is None:
            return row.state, None
        failed = row.state == "failed"
        return row.state, FutureResult(status=row.status, media=row.media, body=row.body, failed=failed)

    async def pending_requests(self) -> list[QueuedRequest]:
        """Accepted requests without a result, oldest first; `order` is their index."""
        r = REQUESTS.c
        query = select(REQUESTS).where(r.state == "pending").order_by(r.created, r.seq)
        async with self._engine.connect() as db:
            rows = (await db.execute(query)).all()
        return [
            queued_request(
                row.id, row.owner, row.model_id, row.seq, order, decode_operation(row.kind, row.model_id, row.payload)
            )
            for order, row in enumerate(rows)
        ]

    async def highest_seqs(self) -> dict[str, tuple[int, int]]:
        """Model -> (highest accepted seq_id, highest seq_id with a result or -1)."""
        finished = func.max(REQUESTS.c.seq).filter(REQUESTS.c.state != "pending")
        query = select(REQUESTS.c.model_id, func.max(REQUESTS.c.seq), finished).group_by(REQUESTS.c.model_id)
        async with self._engine.connect() as db:
            rows = await db.execute(query)
            return {model: (accepted, done if done is not None else -1) for model, accepted, done in rows}

    async def requests_to_replay(self, model: Model) -> list[ReplayedRequest]:
        """The successful requests after the model's captured state, in order.

        `forward` requests are left out: they change nothing in a model, and would split the batch around them.
        """
        r = REQUESTS.c
        query = select(r.id, r.seq, r.kind, r.batch, r.payload).where(
            r.model_id == model.id, r.seq > model.covered, r.state == "done", r.kind != "forward"
        )
        async with self._engine.connect() as db:
            rows = (await db.execute(query.order_by(r.seq))).all()
        return [
            ReplayedRequest(id=row.id, seq=row.seq, kind=row.kind, batch=row.batch, payload=row.payload) for row in rows
        ]

    async def last_used(self, models: Sequence[Model]) -> list[float]:
        """The time of each model's last request."""
        r = REQUESTS.c
        query = select(r.model_id, func.max(r.created)).group_by(r.model_id)
        last: dict[str, float | None] = {}
        async with self._engine.connect() as db:
            for start in range(0, len(models), MAX_QUERY_IDS):
                ids = [model.id for model in models[start : start + MAX_QUERY_IDS]]
                last.update((model, created) for model, created in await db.execute(query.where(r.model_id.in_(ids))))
        return [last.get(model.id) or model.used or model.created for model in models]

    # Transactions.

    async def write(self, work: Callable[[Connection], R]) -> R:
        """Run a transaction on tables without records here. Raises, without waiting, if the database is unavailable."""
        async with self._writing:
            return await self._attempt(work)

    async def _transaction(self, work: Callable[[Connection], R]) -> R:
        """Run a transaction, and wait while the database is unavailable."""
        return await retry_while_unavailable(self._engine, lambda: self._attempt(work))

    async def _attempt(self, work: Callable[[Connection], R]) -> R:
        """Run a transaction in a thread. A cancelled caller waits for its end."""

        def run() -> R:
            with self._sync_engine.begin() as db:
                return work(db)

        return await uninterrupted(asyncio.to_thread(run))

    def _keep(self, records: Iterable[StoredRecord]) -> None:
        for record in records:
            self._records[type(record)][record.id] = record
            if isinstance(record, Checkpoint):
                self._by_run.setdefault(record.run, {})[record.id] = record


async def open_store(data: Path, database: str | None = None) -> Store:
    """Open the store of a data folder, or of the database at a URL. Creates or upgrades its tables."""
    return await _load_store(open_engine(data, database))


@asynccontextmanager
async def exclusive_store(data: Path, database: str | None) -> AsyncIterator[Store]:
    """Open the store for a server, which owns its database. Raises ConfigError if another server uses it."""
    engine = open_engine(data, database)
    try:
        async with exclusive_access(engine):
            store = await _load_store(engine)
            try:
                yield store
            finally:
                await store.close()
    finally:
        await engine.dispose()


async def _load_store(engine: AsyncEngine) -> Store:
    store = Store(engine)
    try:
        await migrate(engine)
        await store.load()
    except BaseException:
        await store.close()
        raise
    return store


def insert_into(db: AsyncConnection | Connection, table: Table) -> Any:
    """An insert statement that supports ON CONFLICT."""
    return _INSERT[db.dialect.name](table)


def upsert_records(db: Connection, records: Iterable[StoredRecord]) -> None:
    """Insert or replace records."""
    for record in records:
        table = TABLES[type(record)]
        values = {field.name: _column_value(getattr(record, field.name)) for field in fields(record)}
        db.execute(insert_into(db, table).values(values).on_conflict_do_update(index_elements=["id"], set_=values))


def record_from_row(kind: type[StoredRecord], row: Row[Any]) -> StoredRecord:
    """The record in a row of its table."""
    values = dict(row._mapping)
    if "lora" in values:
        values["lora"] = LoraSpec(**values["lora"])
    return kind(**values)


def _column_value(value: Any) -> Any:
    return {field.name: getattr(value, field.name) for field in fields(value)} if isinstance(value, LoraSpec) else value
