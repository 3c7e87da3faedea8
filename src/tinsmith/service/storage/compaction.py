"""The size of a SQLite database's files: free pages are given back to the disk, and its log is kept short."""

from __future__ import annotations

import logging
import sqlite3
from pathlib import Path
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError

log = logging.getLogger(__name__)

PAGES = 2000
"""Free pages that one transaction gives back, 8 MiB: other writes wait for it."""
SPARE_PAGES = 1000
"""Free pages that stay for the next rows."""
LOG_BYTES = 32 << 20
"""A log of this size is written to the database and emptied."""


def give_back_pages(engine: Engine) -> int:
    """Give free pages of SQLite back to the disk, except a few. Returns their number.

    Not through the store's writer: a cursor executes one step of this pragma, which is one page, and a script all of
    them without taking Python's lock, but a script ends the transaction that it is in.
    """
    if engine.dialect.name != "sqlite":
        return 0
    given_back = 0
    with engine.connect() as db:
        driver = db.connection.driver_connection
        assert driver is not None
        try:
            free = _free_pages(driver)
            while free > SPARE_PAGES:
                before = free
                driver.executescript(f"PRAGMA incremental_vacuum({min(free - SPARE_PAGES, PAGES)})")
                free = _free_pages(driver)
                if free >= before:  # a file without auto_vacuum, which another program has made
                    break
                given_back += before - free
        except sqlite3.Error as error:
            log.warning("Free pages of the database stay in its file for now: %s", error)
    return given_back


def _free_pages(driver: Any) -> int:
    return driver.execute("PRAGMA freelist_count").fetchone()[0]


def empty_log(engine: Engine, at_bytes: int = LOG_BYTES) -> None:
    """Write a log of SQLite that has reached a size to the database, which may shrink then, and empty it."""
    if engine.dialect.name != "sqlite" or _size(_file(engine).with_name(f"{_file(engine).name}-wal")) < at_bytes:
        return
    with engine.connect() as db:
        driver = db.connection.driver_connection
        assert driver is not None
        driver.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


def database_bytes(engine: Engine) -> int:
    """Size of the files of a SQLite database; of a PostgreSQL database, as it says."""
    if engine.dialect.name == "sqlite":
        file = _file(engine)
        return _size(file) + _size(file.with_name(f"{file.name}-wal"))
    try:
        with engine.connect() as db:
            return db.exec_driver_sql("select pg_database_size(current_database())").scalar_one()
    except DBAPIError:
        return 0


def _file(engine: Engine) -> Path:
    return Path(engine.url.database or "")


def _size(file: Path) -> int:
    return file.stat().st_size if file.is_file() else 0
