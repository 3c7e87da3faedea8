"""Queries of training requests, their payloads and their results."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from sqlalchemy import Connection, Row, Select, delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncEngine

from tinsmith.service.storage.batch import REPLAYED
from tinsmith.service.storage.database import retry_while_unavailable
from tinsmith.service.storage.payload_files import PayloadFiles, PayloadPlace
from tinsmith.service.storage.payloads import decode_operation, queued_request
from tinsmith.service.storage.records import FutureResult, Model, QueuedRequest, ReplayedRequest
from tinsmith.service.storage.tables import PAYLOADS, REQUESTS

R = TypeVar("R")
MAX_QUERY_IDS = 10_000
"""Ids in one query: databases limit the number of parameters."""


class StoredRequests:
    """The requests of one database."""

    def __init__(self, engine: AsyncEngine, files: PayloadFiles | None) -> None:
        self._engine = engine
        self._files = files

    async def result(self, request_id: str, owner: str) -> tuple[str, FutureResult | None] | None:
        """(state, result) of a request, or None if there is no such request. A pending or pruned result is None."""
        query = select(REQUESTS).where(REQUESTS.c.id == request_id, REQUESTS.c.owner == owner)

        row = await self._read(lambda db: db.execute(query).first())
        if row is None:
            return None
        if row.body is None:
            return row.state, None
        failed = row.state == "failed"
        return row.state, FutureResult(status=row.status, media=row.media, body=row.body, failed=failed)

    async def pending_requests(self) -> list[QueuedRequest]:
        """Accepted requests without a result, oldest first; `order` is their index."""
        r = REQUESTS.c
        rows = await self._with_payloads(
            select(r.id, r.owner, r.model_id, r.seq, r.kind, r.payload)
            .where(r.state == "pending")
            .order_by(r.created, r.seq)
        )
        return [
            queued_request(
                row.id, row.owner, row.model_id, row.seq, order, decode_operation(row.kind, row.model_id, payload)
            )
            for order, (row, payload) in enumerate(rows)
        ]

    async def highest_seqs(self) -> dict[str, tuple[int, int]]:
        """Model -> (highest accepted seq_id, highest seq_id with a result or -1)."""
        finished = func.max(REQUESTS.c.seq).filter(REQUESTS.c.state != "pending")
        query = select(REQUESTS.c.model_id, func.max(REQUESTS.c.seq), finished).group_by(REQUESTS.c.model_id)
        rows = await self._read(lambda db: db.execute(query).all())
        return {model: (accepted, done if done is not None else -1) for model, accepted, done in rows}

    async def requests_to_replay(self, model: Model) -> list[ReplayedRequest]:
        """The successful requests after the model's captured state that change it or capture a version, in order."""
        r = REQUESTS.c
        rows = await self._with_payloads(
            select(r.id, r.seq, r.kind, r.batch, r.payload)
            .where(r.model_id == model.id, r.seq > model.covered, r.state == "done", r.kind.in_(REPLAYED))
            .order_by(r.seq)
        )
        return [
            ReplayedRequest(id=row.id, seq=row.seq, kind=row.kind, batch=row.batch, payload=payload)
            for row, payload in rows
        ]

    async def last_used(self, models: Sequence[Model]) -> list[float]:
        """The time of each model's last request."""
        r = REQUESTS.c
        query = select(r.model_id, func.max(r.created)).group_by(r.model_id)
        last: dict[str, float | None] = {}
        for start in range(0, len(models), MAX_QUERY_IDS):
            piece = query.where(r.model_id.in_([model.id for model in models[start : start + MAX_QUERY_IDS]]))
            rows = await self._read(lambda db, piece=piece: db.execute(piece).all())
            last.update((row.model_id, row[1]) for row in rows)
        return [last.get(model.id) or model.used or model.created for model in models]

    async def _read(self, work: Callable[[Connection], R]) -> R:
        """Run queries, and again while the database is unavailable: on a full disk SQLite may not even read."""

        async def read() -> R:
            async with self._engine.connect() as db:
                return await db.run_sync(work)

        return await retry_while_unavailable(self._engine, read)

    async def _with_payloads(self, query: Select[*tuple[Any, ...]]) -> list[tuple[Row[Any], bytes]]:
        """The rows of a query on requests, each with its payload from the row or from its file."""
        rows = await self._read(lambda db: db.execute(with_places(query)).all())
        return await asyncio.to_thread(lambda: [(row, payload_of(row, self._files)) for row in rows])


def with_places(query: Select[*tuple[Any, ...]]) -> Select[*tuple[Any, ...]]:
    """A query on requests, with the places of the payloads that are in files."""
    p = PAYLOADS.c
    return query.add_columns(p.segment, p.offset, p.size).outerjoin(PAYLOADS, p.id == REQUESTS.c.id)


def payload_of(row: Row[Any], files: PayloadFiles | None) -> bytes:
    """The payload of a row of such a query. Raises OSError if its file cannot be read."""
    if row.segment is None or files is None:
        return row.payload
    return files.read(PayloadPlace(row.segment, row.offset, row.size))


def move_payloads_to_rows(db: Connection, files: PayloadFiles) -> None:
    """Make payloads in files a part of their rows; one that cannot be read is missing then."""
    for row in db.execute(select(PAYLOADS)).all():
        with suppress(OSError):
            values = {"payload": payload_of(row, files)}
            db.execute(update(REQUESTS).where(REQUESTS.c.id == row.id).values(values))
    db.execute(delete(PAYLOADS))
