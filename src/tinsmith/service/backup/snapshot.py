"""A consistent view of a service's database: one read transaction, and the folders that its records refer to.

A folder's name is used once: it holds one adapter, complete or not at all, until the server deletes it. So a folder
that was linked for one snapshot is right for every later snapshot that refers to it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, create_engine, func, insert, select, text

from tinsmith.engine.base import LoraSpec
from tinsmith.errors import ConfigError
from tinsmith.service.storage.database import MIGRATIONS, open_engine, sync_engine_of, translate_connection_errors
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
        files = {file.name: file.stat().st_size for file in folder.iterdir()} if folder.is_dir() else {}
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

    def copy_database(self, to: Path, files: PayloadFiles) -> None:
        """Write the rows of the snapshot, with the payloads that are in files, into a new SQLite database."""
        self._copy_rows(to)
        with _disposed(create_engine(f"sqlite:///{to}")) as engine, engine.begin() as target:
            move_payloads_to_rows(target, files)

    def _copy_rows(self, to: Path) -> None:
        if self.db.dialect.name == "sqlite":
            source = cast(sqlite3.Connection, self.db.connection.dbapi_connection)
            target = sqlite3.connect(to)
            source.backup(target)  # reads in the transaction that is open
            target.close()
            return
        with _disposed(create_engine(f"sqlite:///{to}")) as engine, engine.begin() as target_db:
            META.create_all(target_db)
            target_db.execute(text("create table alembic_version (version_num varchar(32) primary key)"))
            target_db.execute(text("insert into alembic_version values (:head)"), {"head": head_revision()})
            copy_rows(self.db, target_db)


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
    file = data / DATABASE
    asynchronous = open_engine(data, database)
    engine = sync_engine_of(asynchronous) if is_live else create_engine(f"sqlite:///file:{file}?immutable=1&uri=true")
    with translate_connection_errors(asynchronous), _disposed(engine), engine.connect() as db:
        if db.dialect.name == "postgresql":
            db.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
        _require_head(db, asynchronous.url.render_as_string(hide_password=True))
        yield Snapshot(
            db=db,
            models=cast(list[Model], _records(db, Model, MODELS)),
            checkpoints=cast(list[Checkpoint], _records(db, Checkpoint, CHECKPOINTS)),
        )


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


def head_revision() -> str | None:
    """The version of the tables of this tinsmith."""
    return ScriptDirectory(str(MIGRATIONS)).get_current_head()


def _require_head(db: Connection, url: str) -> None:
    revision = db.execute(text("select version_num from alembic_version")).scalar()
    if revision != head_revision():
        raise ConfigError(
            f"The database {url} is of version {revision}, this tinsmith's is {head_revision()}.",
            "Use the tinsmith that its server runs, or start this one's server on it first.",
        )


def _records(db: Connection, kind: Any, table: Any) -> list[Any]:
    return [record_from_row(kind, row) for row in db.execute(select(table).order_by(table.c.created, table.c.id))]


@contextmanager
def _disposed(engine: Engine) -> Iterator[Engine]:
    try:
        yield engine
    finally:
        engine.dispose()
