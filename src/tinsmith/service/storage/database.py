"""The database under the store: SQLite in the data folder, or PostgreSQL by its URL. All differences are handled here.

The tables come from `migrations/`, which run at every start. One server owns a database: SQLite's by the lock on its
folder, PostgreSQL's by an advisory lock that lives as long as the connection that holds it. SQLite runs in WAL mode
with synchronous=FULL: what is committed survives the death of any process and a power cut.
"""

from __future__ import annotations

import asyncio
import errno
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
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, create_engine, event, inspect, text
from sqlalchemy.exc import DataError, DBAPIError, OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from tinsmith.errors import BadRequest, ConfigError
from tinsmith.service.storage.tables import META

log = logging.getLogger(__name__)

MIGRATIONS = Path(__file__).parent / "migrations"
_SERVER_LOCK, _MIGRATION_LOCK = 0x74696E73, 0x74696E74
"""Keys of PostgreSQL's advisory locks."""
_PING_S = 5.0
RETRY_S = 0.5
"""Time between two attempts while the database is unavailable."""
_TRANSIENT_SQLITE_ERRORS = {
    *(sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL),
    *(sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY),
}
"""Primary error codes for a locked file, and for a full or missing disk."""
_MIN_SQLITE = (3, 33)
"""First version with UPDATE … FROM."""
R = TypeVar("R")


def open_engine(data: Path, url: str | None) -> AsyncEngine:
    """Connections to the database, none of them open yet.

    Error messages hide the values of their statement, which are tenants' data. Raises ConfigError if PostgreSQL's
    driver is missing, or if Python's SQLite is too old.
    """
    if url is None:
        if sqlite3.sqlite_version_info < _MIN_SQLITE:
            raise ConfigError(
                f"Python's SQLite is {sqlite3.sqlite_version}; 3.33 is needed.",
                "Use a newer build of Python, or PostgreSQL: --database.",
            )
        engine = create_async_engine(f"sqlite+aiosqlite:///{data / 'tinsmith.db'}", hide_parameters=True)
        event.listen(engine.sync_engine, "connect", _configure_sqlite)
        event.listen(engine.sync_engine, "begin", _begin_sqlite)
        return engine
    try:
        return create_async_engine(url, pool_pre_ping=True, hide_parameters=True)
    except ModuleNotFoundError as error:
        raise ConfigError("PostgreSQL's driver is not installed.", "pip install 'tinsmith[postgres]'") from error


def sync_engine_of(engine: AsyncEngine) -> Engine:
    """Connections to the same database for use in a thread.

    A transaction in a thread switches between threads once, one on the asyncio engine once per statement, which is most
    of the time of a small transaction.
    """
    if engine.dialect.name == "postgresql":
        return create_engine(engine.url, pool_pre_ping=True, hide_parameters=True)
    sync_engine = create_engine(f"sqlite:///{engine.url.database}", hide_parameters=True)
    event.listen(sync_engine, "connect", _configure_sqlite)
    event.listen(sync_engine, "begin", _begin_sqlite)
    return sync_engine


async def retry_while_unavailable(engine: AsyncEngine, work: Callable[[], Awaitable[R]]) -> R:
    """Return the work's result, and retry while the database is unavailable.

    It may be restarting, unreachable, locked by another process, or on a full disk. What an engine has done must be
    stored, so callers see a pause in place of an error. The work may run more than once. Raises BadRequest for a value
    that the database cannot store.
    """
    while True:
        try:
            return await work()
        except DBAPIError as error:
            if not is_transient(engine, error):
                raise described(error) from error
            log.warning("%s does not answer; waiting for it: %s", display_url(engine), error.orig)
        await asyncio.sleep(RETRY_S)


def described(error: BaseException) -> BaseException:
    """BadRequest in place of the error of a value that the database cannot store; any other error as it is."""
    if not isinstance(error, DataError):
        return error
    reason = str(error.orig).partition("\n")[0]
    return BadRequest(f"The database cannot store this: {reason}.", "Leave out NUL characters and NaN.")


def is_transient(engine: AsyncEngine | Engine, error: BaseException) -> bool:
    """Whether the same work may succeed later: the database, or the disk of its files, is unavailable.

    At such an error SQLite ends the transaction by itself, and leaving a savepoint then raises another one: the cause
    is in its context.
    """
    return any(_is_transient(engine, each) for each in _with_contexts(error))


def is_full_disk(error: BaseException) -> bool:
    """Whether SQLite, or a file beside it, found no room on the disk."""
    return any(_is_full_disk(each) for each in _with_contexts(error))


def _with_contexts(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and the errors during whose handling it was raised."""
    while error is not None:
        yield error
        error = error.__context__


def _is_transient(engine: AsyncEngine | Engine, error: BaseException) -> bool:
    if not isinstance(error, DBAPIError):
        return isinstance(error, OSError)
    if engine.dialect.name == "postgresql":
        return isinstance(error, OperationalError) or error.connection_invalidated
    return _sqlite_code(error) in _TRANSIENT_SQLITE_ERRORS


def _is_full_disk(error: BaseException) -> bool:
    if isinstance(error, DBAPIError):
        return _sqlite_code(error) in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
    return isinstance(error, OSError) and error.errno == errno.ENOSPC


def _sqlite_code(error: DBAPIError) -> int:
    """SQLite's primary error code; 0 for errors of other databases and of Python's own layer."""
    return vars(error.orig).get("sqlite_errorcode", 0) & 0xFF


async def uninterrupted(work: Awaitable[R]) -> R:
    """Return the work's result. A cancelled caller waits until the work has ended and released its connection."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.gather(asyncio.shield(task), return_exceptions=True)
        raise


def display_url(engine: AsyncEngine | Engine) -> str:
    """The database's URL without its password."""
    return engine.url.render_as_string(hide_password=True)


async def migrate(engine: AsyncEngine, *, upgrade: bool = True) -> None:
    """Create or upgrade the tables, in one transaction, as `migrate_tables` does. Raises ConfigError if it cannot."""
    with translate_connection_errors(engine):
        async with engine.execution_options(exclusive=True).begin() as db:
            await db.run_sync(migrate_tables, upgrade)


def migrate_tables(db: Connection, upgrade: bool = True) -> None:
    """Create or upgrade the tables.

    Without `upgrade`, an older database is refused, since a server may be using it. Raises ConfigError if the database
    is refused, is of a version that has no migration here, or holds tables of another program.
    """
    if db.dialect.name == "postgresql":
        db.execute(text(f"select pg_advisory_xact_lock({_MIGRATION_LOCK})"))
    revision = known_revision(db)
    if revision not in (None, head_revision()):
        if not upgrade:
            require_current(db)
        log.info("Upgrading the database from version %s.", revision)
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["connection"] = db
    command.upgrade(config, "head")


def require_current(db: Connection) -> None:
    """Raise ConfigError unless the database has the tables of this code."""
    revision = known_revision(db)
    if revision != head_revision():
        raise ConfigError(
            f"The database {display_url(db.engine)} is of version {revision}, this tinsmith's is {head_revision()}.",
            "Start this tinsmith's server on it, which upgrades it, or use the tinsmith of its server.",
        )


def head_revision() -> str | None:
    """The version of the tables of this code."""
    return ScriptDirectory(str(MIGRATIONS)).get_current_head()


def known_revision(db: Connection) -> str | None:
    """The version of the tables; None without tables. Raises ConfigError for an unknown one, and for other tables."""
    revision, name = MigrationContext.configure(db).get_current_revision(), f"The database {display_url(db.engine)}"
    if revision is not None:
        require_known(revision, name)
    elif others := set(inspect(db).get_table_names()) & set(META.tables):
        raise ConfigError(
            f"{name} holds tables without a version: {', '.join(sorted(others))}.", "Use another --data or --database."
        )
    return revision


def require_known(revision: str, name: str) -> None:
    """Raise ConfigError unless tables of this version can be upgraded; `name` says what has them."""
    revisions = [script.revision for script in ScriptDirectory(str(MIGRATIONS)).walk_revisions()]
    if revision not in revisions:
        raise ConfigError(
            f"{name} is of version {revision}; this tinsmith knows {', '.join(reversed(revisions))}.",
            "Use the tinsmith that wrote it, or start with an empty --data or --database.",
        )


@asynccontextmanager
async def exclusive_access(engine: AsyncEngine) -> AsyncIterator[None]:
    """Keep other servers off a PostgreSQL database for the duration of the block. Raises ConfigError if one uses it."""
    if engine.dialect.name != "postgresql":
        yield
        return
    lock = _ServerLock(engine)
    with translate_connection_errors(engine):
        await lock.acquire()
    watch = asyncio.create_task(lock.watch())
    try:
        yield
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        await lock.release()


class _ServerLock:
    """An advisory lock, and the connection that holds it."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._connection: AsyncConnection | None = None

    async def acquire(self) -> None:
        """Raises ConfigError if another server holds the lock."""
        self._connection = await self._engine.connect()
        await self._connection.execution_options(isolation_level="AUTOCOMMIT")
        if not (await self._connection.execute(text(f"select pg_try_advisory_lock({_SERVER_LOCK})"))).scalar_one():
            await self.release()
            raise ConfigError(
                f"Another server uses {display_url(self._engine)}.", "End it, or give this one its own --database."
            )

    async def release(self) -> None:
        """Close the connection: in the pool it would keep the lock."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.invalidate()
            await connection.close()

    async def watch(self) -> None:
        """Forever: acquire the lock again after a restart of the database; stop this server if another was faster."""
        while True:
            await asyncio.sleep(_PING_S)
            try:
                if self._connection is None:
                    await self.acquire()
                    log.info("Connected to %s again.", display_url(self._engine))
                else:
                    await self._connection.execute(text("select 1"))
            except DBAPIError as error:
                log.warning("%s does not answer: %s", display_url(self._engine), error.orig)
                await self.release()
            except ConfigError as error:
                log.critical("%s It started while the database was unavailable; this server stops.", error.message)
                os.kill(os.getpid(), signal.SIGTERM)
                return


@contextmanager
def translate_connection_errors(engine: AsyncEngine | Engine) -> Iterator[None]:
    """Raise ConfigError in place of SQLAlchemy's error if the database does not answer."""
    try:
        yield
    except OperationalError as error:
        reason = str(error.orig).strip().partition("\n")[0]
        raise ConfigError(
            f"The database {display_url(engine)} does not answer: {reason}.", "Start it, or correct --database."
        ) from error


def _configure_sqlite(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # `_begin_sqlite` begins transactions: the driver leaves DDL outside of them
    cursor = connection.cursor()
    # auto_vacuum first: it takes effect in an empty file only, and at a VACUUM.
    for pragma in ("auto_vacuum=INCREMENTAL", "busy_timeout=10000", "synchronous=FULL"):
        cursor.execute(f"PRAGMA {pragma}")
    _enable_wal(cursor)
    cursor.close()


def _enable_wal(cursor: Any, timeout_s: float = 10.0) -> None:
    """Switch the file to WAL mode. SQLite does not wait for a lock here, so concurrent first starts retry."""
    deadline = time.monotonic() + timeout_s
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
    exclusive = connection.get_execution_options().get("exclusive", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if exclusive else "BEGIN")
