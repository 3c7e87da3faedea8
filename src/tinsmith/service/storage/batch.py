"""The writes of one transaction: rows of many requests in one statement, and the final state of each record.

A statement for each row of each write would cost more than the rows themselves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

from sqlalchemy import Connection, Row, Table, bindparam, delete, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from tinsmith.engine.base import LoraSpec, Pass
from tinsmith.service.storage.memory import TABLES, Changes, Records, RecordT, StoredRecord
from tinsmith.service.storage.payload_files import INLINE_BYTES, PayloadFiles, PayloadPlace
from tinsmith.service.storage.payloads import kind_of
from tinsmith.service.storage.records import FutureResult, QueuedRequest
from tinsmith.service.storage.row_statements import RowStatement
from tinsmith.service.storage.tables import PAYLOADS, REQUESTS

R = TypeVar("R")
REPLAYED = ("forward_backward", "step", "save_sampler")
"""Kinds of requests that a replay runs again; payloads of others are deleted when they have ended."""
_INSERT: dict[str, Any] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}
"""Standard SQL has no upsert; these two databases have the same one."""
_REQUEST = ("id", "owner", "model_id", "seq", "kind", "created", "state", "payload", "batch")
_RESULT = ("state", "batch", "done", "status", "media", "body")
_INSERT_REQUEST = RowStatement(
    columns=_REQUEST,
    sqlite=f"INSERT INTO requests ({', '.join(_REQUEST)}) VALUES {{rows}}",
    postgresql=REQUESTS.insert(),
)


def _update_requests(columns: Sequence[str], *, is_pending: bool, drops_payload: bool = False) -> RowStatement:
    """A statement that changes columns of requests; its rows are (id, new values)."""
    statement = update(REQUESTS).where(REQUESTS.c.id == bindparam("key"))
    statement = statement.values({name: bindparam(f"new_{name}") for name in columns})
    changes = [f"{name} = new.column{number}" for number, name in enumerate(columns, 2)]
    condition = "requests.id = new.column1"
    if is_pending:
        statement, condition = statement.where(REQUESTS.c.state == "pending"), f"{condition} AND state = 'pending'"
    if drops_payload:
        statement, changes = statement.values(payload=None), [*changes, "payload = NULL"]
    return RowStatement(
        columns=("key", *(f"new_{name}" for name in columns)),
        sqlite=f"UPDATE requests SET {', '.join(changes)} FROM (VALUES {{rows}}) AS new WHERE {condition}",
        postgresql=statement,
    )


_FINISH = _update_requests(_RESULT, is_pending=True)
_FINISH_AND_DROP = _update_requests(_RESULT, is_pending=True, drops_payload=True)
_FETCHED = _update_requests(("fetched",), is_pending=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRequest:
    """A request with its result. Requests of one `batch` ran together."""

    request: QueuedRequest
    result: FutureResult
    batch: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class AcceptedRequest:
    """A request to insert, and its payload."""

    request: QueuedRequest
    payload: bytes
    place: PayloadPlace | None = None
    """Where an earlier attempt put the payload."""
    was_inserted: bool = False
    """Whether an attempt inserted the row: the database may commit without being able to report it."""
    is_new: bool = False
    """Whether the request was not accepted before."""


@dataclass(slots=True, kw_only=True, eq=False)
class Write(Generic[R]):
    """One write. `apply` runs after its request was inserted, possibly several times, and returns the result."""

    apply: Callable[[Batch], R]
    new: AcceptedRequest | None = None
    waits: bool = True
    """Whether it waits while the database is unavailable."""
    result: Any = None
    error: BaseException | None = None


class Batch:
    """Changes that one transaction makes. `flush` executes those that are collected."""

    def __init__(
        self,
        db: Connection,
        records: Records,
        files: PayloadFiles | None,
        changed: Changes | None = None,
    ) -> None:
        """`changed` holds the records that the transaction has changed already."""
        self.db = db
        self._records = records
        self._files = files
        self._earlier = changed or {}
        self.changed: Changes = {}
        self._finished: list[FinishedRequest] = []
        self._fetched: dict[str, float] = {}
        self.dropped_files = False
        """Whether payloads in files were deleted."""

    def run(self, writes: Sequence[Write[Any]], *, is_alone: bool) -> None:
        """Execute writes. `is_alone`: a write of its own, whose request may have been accepted before."""
        self._insert([write.new for write in writes if write.new is not None], check=is_alone)
        for write in writes:
            write.result = write.apply(self)
        self._flush()

    # What writes call.

    def find(self, kind: type[RecordT], key: str) -> RecordT | None:
        """The record with this id as the transaction has it, or None."""
        for changes in (self.changed, self._earlier):
            if (kind, key) in changes:
                record = changes[kind, key]
                assert record is None or isinstance(record, kind)
                return record
        return self._records.find(kind, key)

    def put(self, *records: StoredRecord) -> None:
        """Insert or replace records."""
        self.changed.update({(type(record), record.id): record for record in records})

    def remove(self, *records: StoredRecord) -> None:
        """Delete records."""
        self.changed.update({(type(record), record.id): None for record in records})

    def finish(self, *finished: FinishedRequest) -> None:
        """Store results, unless the requests have one."""
        self._finished += finished

    def mark_fetched(self, request_id: str, at: float) -> None:
        """Store when a result was fetched."""
        self._fetched[request_id] = at

    # Statements.

    def _insert(self, new: Sequence[AcceptedRequest], *, check: bool) -> None:
        """Insert requests. Without `check`, an accepted request raises IntegrityError."""
        rows = []
        for entry in new:
            exists = check and self._exists(entry.request.id)
            entry.is_new = entry.was_inserted or not exists
            if not exists:
                rows.append(entry)
        if not rows:
            return
        in_files = [entry for entry in rows if self._files is not None and len(entry.payload) > INLINE_BYTES]
        for entry in in_files:
            assert self._files is not None
            entry.place = entry.place or self._files.append(entry.payload)
        _INSERT_REQUEST.execute(self.db, [_request_row(entry) for entry in rows])
        if in_files:
            self.db.execute(PAYLOADS.insert(), [_payload_row(entry) for entry in in_files])
        for entry in rows:
            entry.was_inserted = True

    def _exists(self, request_id: str) -> bool:
        return self.db.execute(select(REQUESTS.c.id).where(REQUESTS.c.id == request_id)).first() is not None

    def _flush(self) -> None:
        replayed = [end for end in self._finished if _is_replayed(end)]
        ended = [end for end in self._finished if not _is_replayed(end)]
        for statement, requests in ((_FINISH, replayed), (_FINISH_AND_DROP, ended)):
            rows = {end.request.id: _result_row(end) for end in reversed(requests)}  # the first result of a request
            statement.execute(self.db, list(rows.values())[::-1])
        passes = [end.request.id for end in ended if isinstance(end.request.operation, Pass)]
        if passes and self._files is not None:
            self.db.execute(delete(PAYLOADS).where(PAYLOADS.c.id.in_(passes)))
            self.dropped_files = True
        _FETCHED.execute(self.db, list(self._fetched.items()))
        for kind, table in TABLES.items():
            changes = [(key, record) for (of_kind, key), record in self.changed.items() if of_kind is kind]
            if put := [_record_row(record) for _, record in changes if record is not None]:
                self.db.execute(_upsert(self.db, table), put)
            if removed := [{"key": key} for key, record in changes if record is None]:
                self.db.execute(delete(table).where(table.c.id == bindparam("key")), removed)


def insert_into(db: AsyncConnection | Connection, table: Table) -> Any:
    """An insert statement that supports ON CONFLICT."""
    return _INSERT[db.dialect.name](table)


def record_from_row(kind: type[StoredRecord], row: Row[Any]) -> StoredRecord:
    """The record in a row of its table."""
    values = dict(row._mapping)
    if "lora" in values:
        values["lora"] = LoraSpec(**values["lora"])
    return kind(**values)


def _upsert(db: Connection, table: Table) -> Any:
    insertion = insert_into(db, table)
    values = {column.name: insertion.excluded[column.name] for column in table.columns}
    return insertion.on_conflict_do_update(index_elements=["id"], set_=values)


def _record_row(record: StoredRecord) -> dict[str, Any]:
    return {field.name: _column_value(getattr(record, field.name)) for field in fields(record)}


def _column_value(value: Any) -> Any:
    return {field.name: getattr(value, field.name) for field in fields(value)} if isinstance(value, LoraSpec) else value


def _request_row(entry: AcceptedRequest) -> tuple[Any, ...]:
    """Values of _REQUEST."""
    request, payload = entry.request, entry.payload if entry.place is None else None
    kind = kind_of(request.operation)
    return request.id, request.owner, request.model_id, request.seq, kind, time.time(), "pending", payload, 0


def _payload_row(entry: AcceptedRequest) -> dict[str, Any]:
    assert entry.place is not None
    place = {name: getattr(entry.place, name) for name in ("segment", "offset", "size")}
    return {"id": entry.request.id, "model_id": entry.request.model_id, "seq": entry.request.seq, **place}


def _is_replayed(end: FinishedRequest) -> bool:
    return not end.result.failed and kind_of(end.request.operation) in REPLAYED


def _result_row(end: FinishedRequest) -> tuple[Any, ...]:
    """The id of a request, and values of _RESULT."""
    result, state = end.result, "failed" if end.result.failed else "done"
    return end.request.id, state, end.batch, time.time(), result.status, result.media, result.body
