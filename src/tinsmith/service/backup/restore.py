"""Restore of a backup into an empty data folder, and into an empty PostgreSQL database where a URL names one."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

from sqlalchemy import Connection, Engine, create_engine, select, text

from tinsmith.errors import ConfigError
from tinsmith.plurals import counted
from tinsmith.service.backup.manifest import Manifest, read_manifest
from tinsmith.service.backup.snapshot import DATABASE, copy_rows
from tinsmith.service.storage.database import migrate, open_engine, sync_engine_of
from tinsmith.service.storage.folder_lock import LOCK, lock_folder
from tinsmith.service.storage.tables import META
from tinsmith.settings import writable_folder

SERIAL_TABLES = ("keys", "audit")
"""Tables whose ids PostgreSQL counts by itself."""


def restore(source: Path, data: Path, database: str | None) -> Manifest:
    """Copy a backup into an empty data folder, once all its files agree with its manifest.

    The rows go into the database at the URL, if there is one. Raises ConfigError if the backup is damaged, or if the
    data folder or the database is not empty.
    """
    manifest = read_manifest(source)
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
        asyncio.run(_migrate(data, None))
        if database is not None:
            asyncio.run(_migrate(data, database))
            _move_rows(data, database)
        os.sync()
    return manifest


def _copy(source: Path, to: Path) -> None:
    to.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    shutil.copy2(source, to)
    to.chmod(0o600)


async def _migrate(data: Path, database: str | None) -> None:
    engine = open_engine(data, database)
    try:
        await migrate(engine)
    finally:
        await engine.dispose()


def _move_rows(data: Path, database: str) -> None:
    """Move all rows of the folder's SQLite database to PostgreSQL."""
    file = data / DATABASE
    engines: list[Engine] = [create_engine(f"sqlite:///{file}"), sync_engine_of(open_engine(data, database))]
    try:
        with engines[0].connect() as source, engines[1].begin() as target:
            _require_empty(target)
            copy_rows(source, target)
            for table in SERIAL_TABLES:
                target.execute(
                    text(
                        f"select setval(pg_get_serial_sequence('{table}', 'id'), coalesce(max(id), 1),"
                        f" max(id) is not null) from {table}"
                    )
                )
    finally:
        for engine in engines:
            engine.dispose()
    file.unlink()


def _require_empty(db: Connection) -> None:
    for table in META.sorted_tables:
        if db.execute(select(table).limit(1)).first() is not None:
            raise ConfigError(f"The database holds rows in {table.name}.", "Name an empty --database.")
