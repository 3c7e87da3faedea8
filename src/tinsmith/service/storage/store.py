"""The durable store: records, requests and results in SQLite or PostgreSQL.

Small records (sessions, models, sampling sessions, checkpoints, custom losses) are also held in memory, so reading them
costs nothing; payloads and results of requests are only in the database, or in files beside it, and shadows only in
memory. Every method that writes is atomic; writes that wait at the same time share a transaction, and memory changes
only after its commit. One process owns the database.

A record is a row of its table, with a column for each field; a LoraSpec is JSON.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

from sqlalchemy import Connection, delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncEngine

from tinsmith.service.storage.batch import (
    AcceptedRequest,
    Batch,
    FinishedRequest,
    Write,
    insert_into,
    record_from_row,
)
from tinsmith.service.storage.compaction import database_bytes, empty_log, give_back_pages
from tinsmith.service.storage.database import display_url, exclusive_access, migrate, open_engine, sync_engine_of
from tinsmith.service.storage.memory import TABLES, Records, RecordT, StoredRecord
from tinsmith.service.storage.payload_files import PAYLOADS_FOLDER, PayloadFiles
from tinsmith.service.storage.records import Checkpoint, Model, QueuedRequest, SamplingSession, Shadow
from tinsmith.service.storage.requests import StoredRequests
from tinsmith.service.storage.tables import META, PAYLOADS, REQUESTS
from tinsmith.service.storage.writer import GroupWriter, segments_in_use

__all__ = [
    "FinishedRequest",
    "Store",
    "StoredRecord",
    "exclusive_store",
    "insert_into",
    "open_store",
    "record_from_row",
]

R = TypeVar("R")


class Store(StoredRequests):
    """The records and requests of one database. Made by `open_store` and `exclusive_store`."""

    def __init__(self, engine: AsyncEngine, data: Path) -> None:
        # PostgreSQL keeps payloads in their rows: a copy of the database is complete then.
        files = PayloadFiles(data / PAYLOADS_FOLDER) if engine.dialect.name == "sqlite" else None
        super().__init__(engine, files)
        self.database = engine
        self._sync_engine = sync_engine_of(engine)
        self._records = Records()
        self._writer = GroupWriter(self._sync_engine, self._records, files)
        self.shadows: dict[str, Shadow] = {}
        """By model id. `find` finds their models, `all` leaves them out; their requests are not stored."""
        self._dropped: dict[str, int] = {}
        """Model -> the seq_id up to which payloads of its requests are deleted."""
        self.row_counts: dict[str, int] = {}
        """Rows of each table when they were last counted."""

    @property
    def name(self) -> str:
        """The database's URL without its password; `sqlite` for the file in the data folder."""
        return "sqlite" if self._engine.dialect.name == "sqlite" else display_url(self._engine)

    def on_full_disk(self, release: Callable[[], None]) -> None:
        """Call `release` when a transaction found the disk full, before it is repeated."""
        self._writer.on_full_disk = release

    async def load(self) -> None:
        """Read all records into memory, and remove the payload files that nothing refers to."""
        async with self._engine.connect() as db:
            for kind, table in TABLES.items():
                rows = await db.execute(select(table).order_by(table.c.created, table.c.id))
                self._records.apply({(kind, row.id): record_from_row(kind, row) for row in rows})
            if self._files is not None:
                self._files.remove_all_but(await db.run_sync(segments_in_use))

    async def close(self) -> None:
        """Close the connections."""
        await self._writer.close()
        if self._files is not None:
            self._files.close()
        self._sync_engine.dispose()
        await self._engine.dispose()

    @property
    def is_available(self) -> bool:
        """Whether the last transaction reached the database and its disk."""
        return self._writer.is_available

    # Records.

    def find(self, kind: type[RecordT], key: str) -> RecordT | None:
        """The record with this id, or None."""
        record = self._records.find(kind, key)
        if record is None and kind is Model and (shadow := self.shadows.get(key)) is not None:
            return cast(RecordT, shadow.model)
        return record

    def all(self, kind: type[RecordT]) -> list[RecordT]:
        """All records of a kind, oldest first."""
        return self._records.all(kind)

    def checkpoints_of_run(self, run: str) -> list[Checkpoint]:
        """A run's checkpoints, unnamed ones included, oldest first."""
        return self._records.of_run(run)

    def users_of(self, version: str) -> list[SamplingSession | Model]:
        """The sampling sessions that sample from a version, and the models whose inflight version it is."""
        return self._records.users_of(version)

    def take_changed_checkpoints(self) -> set[str]:
        """Ids of the checkpoints that were added, replaced or removed since the last call; for one reader."""
        changed, self._records.changed_checkpoints = self._records.changed_checkpoints, set()
        return changed

    def checkpoint_bytes(self, owner: str) -> int:
        """Size of all checkpoints of an owner, unnamed ones included."""
        return self._records.stored_bytes[owner]

    def count_sampling_sessions(self, session_id: str) -> int:
        """Number of a session's sampling sessions."""
        return self._records.sampling_sessions[session_id]

    async def put(self, *records: StoredRecord) -> None:
        """Insert or replace records."""
        await self._write(lambda batch: batch.put(*records))

    async def update(self, kind: type[RecordT], key: str, **changes: Any) -> RecordT | None:
        """Change fields of a record and return it; None if it is gone. For records that several tasks write."""

        def change(batch: Batch) -> RecordT | None:
            record = batch.find(kind, key)
            if record is not None:
                record = replace(record, **changes)
                batch.put(record)
            return record

        return await self._write(change)

    async def remove(self, *records: StoredRecord) -> None:
        """Delete records."""
        await self._write(lambda batch: batch.remove(*records))

    # Requests.

    async def accept(self, request: QueuedRequest, payload: bytes, *records: StoredRecord) -> bool:
        """Store a request and its payload, with the records that it creates. Its result may be promised after this.

        False, and nothing is stored, if a request with this id was accepted before.
        """
        if self._use_shadow(request.model_id):
            return True
        new = AcceptedRequest(request=request, payload=payload)

        def put_records(batch: Batch) -> bool:
            if new.is_new:
                batch.put(*records)
            return new.is_new

        return await self._writer.submit(Write(apply=put_records, new=new))

    async def finish(self, finished: Sequence[FinishedRequest], *records: StoredRecord) -> None:
        """Store results, with the records that the requests changed. The first result of a request stays."""
        finished = [end for end in finished if not self._use_shadow(end.request.model_id)]
        records = tuple(record for record in records if not self._keep_shadow(record))
        if not (finished or records):
            return

        def store_results(batch: Batch) -> None:
            batch.finish(*finished)
            batch.put(*records)

        await self._write(store_results)

    def mark_fetched(self, request_id: str) -> None:
        """A client has fetched the result of a request. Stored with the next write; a crash may lose it."""
        now = time.time()
        self._writer.submit_later(Write(apply=lambda batch: batch.mark_fetched(request_id, now)))

    async def cover(self, model: Model) -> None:
        """Store a model with a newly captured state, and delete the payloads of the requests that it covers.

        All of them have ended, since the requests of a model run in order.
        """
        r, p = REQUESTS.c, PAYLOADS.c
        after = self._dropped.get(model.id, -1)
        covered = (r.model_id == model.id, r.seq > after, r.seq <= model.covered, r.state != "pending")

        def cover_requests(batch: Batch) -> None:
            batch.put(model)
            batch.db.execute(update(REQUESTS).where(*covered, r.payload.is_not(None)).values(payload=None))
            if self._files is not None:
                of_requests = p.id.in_(select(r.id).where(*covered))
                batch.db.execute(delete(PAYLOADS).where(p.model_id == model.id, p.seq <= model.covered, of_requests))
                batch.dropped_files = True

        await self._write(cover_requests)
        self._dropped[model.id] = model.covered
        if model.state == "ended":
            del self._dropped[model.id]

    # Transactions.

    async def write(self, work: Callable[[Connection], R]) -> R:
        """Run a transaction on tables without records here. Raises, without waiting, if the database is unavailable."""
        return await self._writer.submit(Write(apply=lambda batch: work(batch.db), waits=False))

    async def run(self, work: Callable[[Connection], R]) -> R:
        """The same, and wait while the database is unavailable."""
        return await self._write(lambda batch: work(batch.db))

    async def _write(self, apply: Callable[[Batch], R]) -> R:
        return await self._writer.submit(Write(apply=apply))

    # Size.

    async def compact(self) -> None:
        """Give unused space back to the disk, and count the rows."""
        given_back = await asyncio.to_thread(give_back_pages, self._sync_engine)
        await asyncio.to_thread(empty_log, self._sync_engine, *([0] if given_back else []))
        async with self._engine.connect() as db:
            for table in META.sorted_tables:
                count = select(func.count()).select_from(table)
                self.row_counts[table.name] = (await db.execute(count)).scalar_one()

    def database_bytes(self) -> int:
        """Size of the database's files."""
        return database_bytes(self._sync_engine)

    def payload_bytes(self) -> int:
        """Size of the payload files."""
        return sum(self._files.segments().values()) if self._files is not None else 0

    # Shadows.

    def _use_shadow(self, model_id: str) -> bool:
        """Restart the time to live of a shadow; False for any other model."""
        shadow = self.shadows.get(model_id)
        if shadow is not None:
            shadow.used = time.monotonic()
        return shadow is not None

    def _keep_shadow(self, record: StoredRecord) -> bool:
        """Keep the new state of a shadow's model; False for any other record."""
        if not (isinstance(record, Model) and record.id in self.shadows):
            return False
        self.shadows[record.id].model = record
        return True


async def open_store(data: Path, database: str | None = None) -> Store:
    """Open the store of a data folder, or of the database at a URL. Creates or upgrades its tables."""
    return await _load_store(open_engine(data, database), data)


@asynccontextmanager
async def exclusive_store(data: Path, database: str | None) -> AsyncIterator[Store]:
    """Open the store for a server, which owns its database. Raises ConfigError if another server uses it."""
    engine = open_engine(data, database)
    try:
        async with exclusive_access(engine):
            store = await _load_store(engine, data)
            try:
                yield store
            finally:
                await store.close()
    finally:
        await engine.dispose()


async def _load_store(engine: AsyncEngine, data: Path) -> Store:
    store = Store(engine, data)
    try:
        await migrate(engine)
        await store.load()
    except BaseException:
        await store.close()
        raise
    return store
