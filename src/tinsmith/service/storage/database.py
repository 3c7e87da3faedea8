"""The database behind the store: SQLite in the data folder, or PostgreSQL by its URL. What differs is here alone.

Its tables come from `migrations/`, run at every start. One server owns a database: SQLite's by the lock on its folder,
PostgreSQL's by an advisory lock that goes with the connection that holds it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Connection, Engine, create_engine, event, inspect, text
from sqlalchemy.exc import DataError, DBAPIError, OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from tinsmith.errors import BadRequest, ConfigError
from tinsmith.service.storage.tables import META

log = logging.getLogger(__name__)

MIGRATIONS = Path(__file__).parent / "migrations"
FIRST_REVISION = "0001"
"""What a folder holds that was written before there were migrations: SQLite's user_version 1."""
_SERVING, _MIGRATING = 0x74696E73, 0x74696E74
"""Advisory locks of PostgreSQL are numbers, the same for everyone who means the same thing."""
_PING_S = 5.0
_AWAY_S = 0.5
_AWAY = {
    *(sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL),
    *(sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY),
}
"""What SQLite says of a file that is locked, or of a disk that is full or away: the low byte of its code."""
R = TypeVar("R")


def open_engine(data: Path, url: str | None) -> AsyncEngine:
    """Connections to the database; none is opened yet. Raises ConfigError if PostgreSQL's driver is missing.

    Errors do not tell the values of their statement: they are tenants' data.
    """
    if url is None:
        engine = create_async_engine(f"sqlite+aiosqlite:///{data / 'tinsmith.db'}", hide_parameters=True)
        event.listen(engine.sync_engine, "connect", _configure_sqlite)
        event.listen(engine.sync_engine, "begin", _begin_sqlite)
        return engine
    try:
        return create_async_engine(url, pool_pre_ping=True, hide_parameters=True)
    except ModuleNotFoundError as error:
        raise ConfigError("PostgreSQL's driver is not installed.", "pip install 'tinsmith[postgres]'") from error


def sync_engine_of(engine: AsyncEngine) -> Engine:
    """The same database for a thread that may wait for it: a transaction goes there and back once, where the asyncio
    engine goes once for each statement, and that takes most of a small transaction's time."""
    if engine.dialect.name == "postgresql":
        return create_engine(engine.url, pool_pre_ping=True, hide_parameters=True)
    direct = create_engine(f"sqlite:///{engine.url.database}", hide_parameters=True)
    event.listen(direct, "connect", _configure_sqlite)
    event.listen(direct, "begin", _begin_sqlite)
    return direct


async def retry_while_unavailable(engine: AsyncEngine, work: Callable[[], Awaitable[R]]) -> R:
    """The work's result. A database that is away is waited for (a restart of PostgreSQL, a fault of the network, a lock
    of somebody else's on SQLite's file, a full disk): what an engine has done must be written down, and who asks
    meanwhile sees a pause. The work may run more than once.

    Raises BadRequest for a value that the database cannot hold.
    """
    while True:
        try:
            return await work()
        except DataError as error:
            told = str(error.orig).partition("\n")[0]
            raise BadRequest(f"The database cannot hold this: {told}.", "Leave out NUL characters and NaN.") from error
        except DBAPIError as error:
            if not _passes(engine, error):
                raise
            log.warning("%s does not answer; waiting for it: %s", display_url(engine), error.orig)
        await asyncio.sleep(_AWAY_S)


def _passes(engine: AsyncEngine, error: DBAPIError) -> bool:
    """Whether the same work may go through later."""
    if engine.dialect.name == "postgresql":
        return isinstance(error, OperationalError) or error.connection_invalidated
    code = vars(error.orig).get("sqlite_errorcode", 0)  # errors that Python's own layer makes have none
    return code & 0xFF in _AWAY


async def uninterrupted(work: Awaitable[R]) -> R:
    """The work's result. Nothing cancels the work: who is cancelled waits until it has given its connection back."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.gather(asyncio.shield(task), return_exceptions=True)
        raise


def display_url(engine: AsyncEngine) -> str:
    """The database's URL as people may read it, without its password."""
    return engine.url.render_as_string(hide_password=True)


async def migrate(engine: AsyncEngine, *, upgrade: bool = True) -> None:
    """Bring the tables to what this version of the code expects; all of it, or none.

    Raises ConfigError if the database cannot be reached, is newer than the code, or is not this service's; without
    `upgrade` also if it is older, since a server may be using it.
    """
    try:
        with translate_connection_errors(engine):
            async with engine.execution_options(alone=True).begin() as db:
                if db.dialect.name == "postgresql":
                    await db.execute(text(f"select pg_advisory_xact_lock({_MIGRATING})"))
                await db.run_sync(_migrate, upgrade)
    except CommandError as error:
        what = f"The database {display_url(engine)} is of another version: {error}."
        raise ConfigError(what, "Use the tinsmith that wrote it, or another --data or --database.") from error


@asynccontextmanager
async def exclusive_access(engine: AsyncEngine) -> AsyncIterator[None]:
    """Refuses a second server on one PostgreSQL database, for as long as the block runs. Raises ConfigError."""
    if engine.dialect.name != "postgresql":
        yield
        return
    lock = _Lock(engine)
    with translate_connection_errors(engine):
        await lock.take()
    watch = asyncio.create_task(lock.keep())
    try:
        yield
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        await lock.release()


class _Lock:
    """An advisory lock lives as long as the connection that took it."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._holder: AsyncConnection | None = None

    async def take(self) -> None:
        """Raises ConfigError if another server has it."""
        self._holder = await self._engine.connect()
        await self._holder.execution_options(isolation_level="AUTOCOMMIT")
        if not (await self._holder.execute(text(f"select pg_try_advisory_lock({_SERVING})"))).scalar_one():
            await self.release()
            what = f"Another server uses {display_url(self._engine)}."
            raise ConfigError(what, "End it, or give this one its own --database.")

    async def release(self) -> None:
        """Ends the connection: in the pool the lock would live on."""
        holder, self._holder = self._holder, None
        if holder is not None:
            await holder.invalidate()
            await holder.close()

    async def keep(self) -> None:
        """For ever: after a restart of the database take it anew; if another server was faster, end this one."""
        while True:
            await asyncio.sleep(_PING_S)
            try:
                if self._holder is None:
                    await self.take()
                    log.info("Connected to %s again.", display_url(self._engine))
                else:
                    await self._holder.execute(text("select 1"))
            except DBAPIError as error:
                log.warning("%s does not answer: %s", display_url(self._engine), error.orig)
                await self.release()
            except ConfigError as error:
                log.critical("%s It began while the database was away; this one ends.", error.message)
                os.kill(os.getpid(), signal.SIGTERM)
                return


@contextmanager
def translate_connection_errors(engine: AsyncEngine) -> Iterator[None]:
    """Raises ConfigError where the database does not answer."""
    try:
        yield
    except OperationalError as error:
        told = str(error.orig).strip().partition("\n")[0]
        what = f"The database {display_url(engine)} does not answer: {told}."
        raise ConfigError(what, "Start it, or correct --database.") from error


def _migrate(db: Connection, upgrade: bool) -> None:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["connection"] = db
    found = _version_of(db)
    if found is not None and found != ScriptDirectory.from_config(config).get_current_head():
        if not upgrade:
            what = f"The database {db.engine.url.render_as_string()} is of version {found}."
            raise ConfigError(what, "Start this tinsmith's server on it: it brings the database up to date.")
        log.info("Upgrading the database from version %s.", found)
    if found == FIRST_REVISION:
        command.stamp(config, FIRST_REVISION)
    command.upgrade(config, "head")


def _version_of(db: Connection) -> str | None:
    """None for an empty database. Raises ConfigError for tables that are not this service's."""
    tables = set(inspect(db).get_table_names())
    if "alembic_version" in tables:
        return db.execute(text("select version_num from alembic_version")).scalar()
    schema = db.exec_driver_sql("PRAGMA user_version").scalar_one() if db.dialect.name == "sqlite" else 0
    if schema == 1:
        return FIRST_REVISION
    if schema or tables & set(META.tables):
        what = f"The database {db.engine.url.render_as_string()} holds tables of something else (schema {schema})."
        raise ConfigError(what, "Use another --data or --database.")
    return None


def _configure_sqlite(connection: Any, _record: Any) -> None:
    """Transactions are begun by `_begin_sqlite`: the driver itself would leave changes of tables outside of them."""
    connection.isolation_level = None
    cursor = connection.cursor()
    for pragma in ("busy_timeout=10000", "synchronous=FULL"):
        cursor.execute(f"PRAGMA {pragma}")
    _write_ahead(cursor)
    cursor.close()


def _write_ahead(cursor: Any, within_s: float = 10.0) -> None:
    """WAL, a property of the file. SQLite waits for no lock here, so of several first starts all but one try again."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        else:
            return


def _begin_sqlite(connection: Connection) -> None:
    alone = connection.get_execution_options().get("alone", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if alone else "BEGIN")
