"""Restore of a backup into an empty data folder, and into an empty PostgreSQL database where a URL names one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Connection, select, text

from tinsmith.errors import ConfigError
from tinsmith.plurals import counted
from tinsmith.service.backup.manifest import BackupManifest, read_manifest
from tinsmith.service.backup.snapshot import DATABASE, copy_rows, open_database
from tinsmith.service.storage.database import migrate_tables, require_known
from tinsmith.service.storage.folder_lock import LOCK, lock_folder
from tinsmith.service.storage.tables import META
from tinsmith.settings import writable_folder

SERIAL_TABLES = ("keys", "audit")
"""Tables whose ids PostgreSQL counts by itself."""


def restore(source: Path, data: Path, database: str | None) -> BackupManifest:
    """Copy a backup into an empty data folder, once all its files agree with its manifest.

    The rows go into the database at the URL, if there is one. Raises ConfigError if the backup is damaged, or if the
    data folder or the database is not empty.
    """
    manifest = read_manifest(source)
    require_known(manifest.schema, f"The backup {source}")
    faults = sorted(manifest.faults(source).items())
    if faults:
        raise ConfigError(
            f"{source} is damaged: {faults[0][0]} {faults[0][1]} ({counted(len(faults), 'such file')}).",
            f"Use another backup; tinsmith verify {source} lists the files.",
        )
    writable_folder(data, "--data")
    if [entry for entry in data.iterdir() if entry.name not in (LOCK, "lost+found")]:
        raise ConfigError(f"{data} is not empty.", "Restore into another folder, or move this one away first.")
    with lock_folder(data):
        data.chmod(0o700)
        for path in sorted(manifest.files, key=lambda name: name == DATABASE):  # last: without it, nothing is served
            _copy(source / path, data / path)
        with _migrated(data, None) as rows:
            if database is not None:
                with _migrated(data, database) as target:
                    _copy_rows(rows, target)
        if database is not None:
            (data / DATABASE).unlink()
        os.sync()
    return manifest


def _copy(source: Path, to: Path) -> None:
    to.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    shutil.copy2(source, to)
    to.chmod(0o600)


@contextmanager
def _migrated(data: Path, database: str | None) -> Iterator[Connection]:
    """A transaction on a database that has this version's tables."""
    with open_database(data, database) as engine, engine.begin() as db:
        migrate_tables(db)
        yield db


def _copy_rows(source: Connection, target: Connection) -> None:
    """Copy all rows of the backup into an empty PostgreSQL database."""
    _require_empty(target)
    copy_rows(source, target)
    for table in SERIAL_TABLES:
        target.execute(
            text(
                f"select setval(pg_get_serial_sequence('{table}', 'id'), coalesce(max(id), 1),"
                f" max(id) is not null) from {table}"
            )
        )


def _require_empty(db: Connection) -> None:
    for table in META.sorted_tables:
        if db.execute(select(table).limit(1)).first() is not None:
            raise ConfigError(f"The database holds rows in {table.name}.", "Name an empty --database.")
