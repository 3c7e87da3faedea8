"""A consistent view of a service's database: one read transaction, and the folders that its records refer to.

A folder's name is used once: it holds one adapter, complete or not at all, until the server deletes it. So a folder
that was linked for one snapshot is right for every later snapshot that refers to it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from sqlalchemy import Connection, Engine, create_engine, func, insert, select

from tinsmith.engine.base import LoraSpec
from tinsmith.errors import ConfigError
from tinsmith.service.storage.database import (
    migrate_tables,
    open_engine,
    require_current,
    sync_engine_of,
    translate_connection_errors,
)
from tinsmith.service.storage.payload_files import PayloadFiles
from tinsmith.service.storage.records import Checkpoint, Model
from tinsmith.service.storage.requests import move_payloads_to_rows
from tinsmith.service.storage.store import record_from_row
from tinsmith.service.storage.tables import CHECKPOINTS, META, MODELS

DATABASE = "tinsmith.db"
"""The SQLite database of a data folder, and of every backup."""
ROWS = 500
"""Rows that are copied at a time."""
ADAPTER = "adapter_model.safetensors"
OPTIMIZER = "optimizer.safetensors"
CONFIG = "adapter_config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFolder:
    """A folder with an adapter that a record refers to."""

    path: str
    """Relative to the data folder."""
    record: str
    """The record, for messages."""
    lora: LoraSpec
    names: tuple[str, ...]
    """Files that it must have; empty if they are encrypted."""
    size_bytes: int | None = None
    """Size of its files together, if it is recorded."""
    digest: str | None = None
    """Its object in the object store, from which a server fetches it if it is missing."""

    def is_complete(self, folder: Path) -> bool:
        """Whether a copy of it has all its files. The server deletes a folder file by file."""
        try:
            files = {file.name: file.stat().st_size for file in folder.iterdir()}
        except FileNotFoundError:  # it is being deleted
            return False
        whole = self.size_bytes is None or sum(files.values()) == self.size_bytes
        return bool(files) and whole and all(name in files for name in self.names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One read transaction on a database."""

    db: Connection
    models: list[Model] = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=list)

    def folders(self) -> list[StoredFolder]:
        """The folders that records refer to; those that the server soonest deletes come first."""
        return [*self.states(), *self.saved()]

    def states(self) -> list[StoredFolder]:
        """The captured states of models that have not ended."""
        return [
            StoredFolder(
                path=f"journal/{model.captured}",
                record=f"model {model.id}",
                lora=model.lora,
                names=(ADAPTER, CONFIG, *((OPTIMIZER,) if model.captured_optimizer else ())),
                digest=model.captured_digest,
            )
            for model in self.models
            if model.state != "ended" and model.captured is not None
        ]

    def saved(self) -> list[StoredFolder]:
        """The folders of checkpoints on disk, unnamed ones first."""
        checkpoints = [each for each in self.checkpoints if each.ready and not each.deleted]
        return [
            StoredFolder(
                path=f"checkpoints/{checkpoint.id}",
                record=f"checkpoint {checkpoint.path}",
                lora=checkpoint.lora,
                names=_names(checkpoint),
                size_bytes=checkpoint.size_bytes,
                digest=checkpoint.digest,
            )
            for checkpoint in sorted(checkpoints, key=lambda each: each.kind != "ephemeral")
        ]

    def counts(self) -> dict[str, int]:
        """Number of rows of each table."""
        return {
            table.name: self.db.execute(select(func.count()).select_from(table)).scalar_one()
            for table in META.sorted_tables
        }

    def copy_database(self, folder: Path, files: PayloadFiles) -> None:
        """Write the rows of the snapshot, with the payloads that are in files, into a new SQLite database."""
        if self.db.dialect.name == "sqlite":
            source = cast(sqlite3.Connection, self.db.connection.dbapi_connection)
            with closing(sqlite3.connect(folder / DATABASE)) as copy:
                source.backup(copy)  # reads in the transaction that is open
        with open_database(folder, None) as engine, engine.begin() as target:
            if self.db.dialect.name != "sqlite":
                migrate_tables(target)
                copy_rows(self.db, target)
            move_payloads_to_rows(target, files)


def _names(checkpoint: Checkpoint) -> tuple[str, ...]:
    if checkpoint.kind == "external_weights":  # possibly encrypted
        return ()
    return (ADAPTER, CONFIG, *((OPTIMIZER,) if checkpoint.optimizer else ()))


@contextmanager
def open_snapshot(data: Path, database: str | None, *, is_live: bool = True) -> Iterator[Snapshot]:
    """Read the database of a data folder, or at a URL, in one transaction, while a server may be writing to it.

    Without `is_live`, nothing is written, not even SQLite's own files. Raises ConfigError if there is no database, or
    if it is of another version.
    """
    require_database(data, database)
    with open_database(data, database, is_live=is_live) as engine, engine.connect() as db:
        if db.dialect.name == "postgresql":
            db.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
        require_current(db)
        yield Snapshot(
            db=db,
            models=cast(list[Model], _records(db, Model, MODELS)),
            checkpoints=cast(list[Checkpoint], _records(db, Checkpoint, CHECKPOINTS)),
        )


@contextmanager
def open_database(folder: Path, database: str | None, *, is_live: bool = True) -> Iterator[Engine]:
    """Connections to the SQLite database of a folder, or to the database at a URL. Raises ConfigError."""
    if is_live:
        engine = sync_engine_of(open_engine(folder, database))
    else:
        engine = create_engine(f"sqlite:///file:{folder / DATABASE}?immutable=1&uri=true")
    try:
        with translate_connection_errors(engine):
            yield engine
    finally:
        engine.dispose()


def require_database(data: Path, database: str | None) -> None:
    """Raise ConfigError unless the folder holds a database or a URL names one. Nothing is created."""
    if database is None and not (data / DATABASE).is_file():
        raise ConfigError(f"{data} holds no database.", "Name the service's data folder, and its --database if any.")


def copy_rows(source: Connection, target: Connection) -> None:
    """Copy all rows between databases with equal tables."""
    for table in META.sorted_tables:
        rows = source.execute(select(table).execution_options(yield_per=ROWS))
        for part in rows.mappings().partitions():
            target.execute(insert(table), [dict(row) for row in part])


def _records(db: Connection, kind: Any, table: Any) -> list[Any]:
    return [record_from_row(kind, row) for row in db.execute(select(table).order_by(table.c.created, table.c.id))]
