"""Records that the store holds in memory, as rows of their tables.

A column for each field, of the same name; a LoraSpec is JSON.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any, TypeVar

from sqlalchemy import Connection, Table
from sqlalchemy import Row as SqlRow
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from tinsmith.engine.base import LoraSpec
from tinsmith.service.records import Checkpoint, CustomLoss, Model, Sampler, Session
from tinsmith.service.tables import CHECKPOINTS, CUSTOM_LOSSES, MODELS, SAMPLERS, SESSIONS

Held = Session | Model | Sampler | Checkpoint | CustomLoss
H = TypeVar("H", Session, Model, Sampler, Checkpoint, CustomLoss)
TABLES: dict[type[Held], Table] = {
    Session: SESSIONS,
    Model: MODELS,
    Sampler: SAMPLERS,
    Checkpoint: CHECKPOINTS,
    CustomLoss: CUSTOM_LOSSES,
}
_INSERT: dict[str, Any] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}
"""The standard has no "or else" for an insert; these two have the same."""


def insert_into(db: AsyncConnection | Connection, table: Table) -> Any:
    """An insert that can say what happens to rows which are there."""
    return _INSERT[db.dialect.name](table)


def write_all(db: Connection, records: Iterable[Held]) -> None:
    """Records, new or changed."""
    for record in records:
        table = TABLES[type(record)]
        values = {field.name: _plain(getattr(record, field.name)) for field in fields(record)}
        db.execute(insert_into(db, table).values(values).on_conflict_do_update(index_elements=["id"], set_=values))


def record_of(kind: type[Held], found: SqlRow[Any]) -> Held:
    """The record in a row."""
    values = dict(found._mapping)
    if "lora" in values:
        values["lora"] = LoraSpec(**values["lora"])
    return kind(**values)


def _plain(value: Any) -> Any:
    return {field.name: getattr(value, field.name) for field in fields(value)} if isinstance(value, LoraSpec) else value
