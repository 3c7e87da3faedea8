"""Buffer in a database that the sampling and training processes share, also across machines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, TypeVar

from pydantic import Field
from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    Engine,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    create_engine,
    delete,
    insert,
    select,
    update,
)
from sqlalchemy.exc import (
    ArgumentError,
    IntegrityError,
    NoSuchModuleError,
    OperationalError,
    ProgrammingError,
    SQLAlchemyError,
)
from typing_extensions import override

from tinsmith.errors import ConfigError, TinsmithError
from tinsmith.rl.rollouts.buffers.base import Buffer, Record
from tinsmith.rl.rollouts.buffers.replay import BufferSettings
from tinsmith.rl.rollouts.progress import BATCH, Batch

T = TypeVar("T")


class SerialExecutor:
    """Runs functions in order in a single thread."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="buffer")

    async def run(self, function: Callable[[], T]) -> T:
        """Run `function` after all functions submitted earlier, and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    async def close(self) -> None:
        """Wait until all submitted functions have run, then end the thread."""
        await asyncio.to_thread(self._thread.shutdown)


_TABLES = MetaData()
_BATCHES = Table(
    "rl_batches",
    _TABLES,
    Column("run", String(200), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("batch", Text, nullable=False),
)
_NOTES = Table(
    "rl_notes",
    _TABLES,
    Column("run", String(200), primary_key=True),
    Column("name", String(50), primary_key=True),
    Column("text", Text, nullable=False),
)
_RECORDS = Table(
    "rl_records",
    _TABLES,
    Column("run", String(200), primary_key=True),
    Column("name", String(50), primary_key=True),
    Column("revision", Integer, nullable=False),
    Column("text", Text, nullable=False),
)
_SQLITE_WAIT_S = 60
"""Time that a statement waits for the lock of a SQLite file that another process holds."""


class SqlConfig(BufferSettings):
    """Batches in a database. They outlive the process and other processes can open them."""

    type: Literal["sql"] = "sql"
    url: str
    """SQLAlchemy URL, such as sqlite:///FILE or postgresql+psycopg://USER:PASSWORD@HOST/NAME."""
    run: str = Field(default="", max_length=200)
    """Name that the rows are stored under, equal in both processes; empty: the name of the run."""


class SqlBuffer(Buffer):
    """Buffer in a database. Statements run in a separate thread."""

    durable = True

    def __init__(self, url: str, run: str) -> None:
        """Open the database and create missing tables. Raises ConfigError if it cannot be opened."""
        self._run, self._executor = run, SerialExecutor()
        try:
            waits = {"timeout": _SQLITE_WAIT_S} if url.startswith("sqlite") else {}
            self._engine = create_engine(url, pool_pre_ping=True, connect_args=waits)
            _create_tables(self._engine)
        except (SQLAlchemyError, ArgumentError, NoSuchModuleError, ImportError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"buffer.url: cannot open the database: {reason}", "Check the URL.") from error

    @override
    async def put(self, batch: Batch) -> None:
        body = BATCH.dump_json(batch).decode()

        def write(connection: Connection) -> None:
            connection.execute(delete(_BATCHES).where(self._is_batch(batch.step)))
            connection.execute(insert(_BATCHES).values(run=self._run, number=batch.step, batch=body))

        await self._execute(write)

    @override
    async def numbers(self) -> Collection[int]:
        query = select(_BATCHES.c.number).where(_BATCHES.c.run == self._run)
        return await self._execute(lambda connection: list(connection.execute(query).scalars()))

    @override
    async def get(self, number: int) -> Batch:
        query = select(_BATCHES.c.batch).where(self._is_batch(number))
        return BATCH.validate_json(await self._execute(lambda connection: connection.execute(query).scalar_one()))

    @override
    async def drop(self, numbers: Collection[int]) -> None:
        statement = delete(_BATCHES).where(_BATCHES.c.run == self._run, _BATCHES.c.number.in_(list(numbers)))
        if numbers:
            await self._execute(lambda connection: connection.execute(statement))

    @override
    async def note(self, name: str, text: str) -> None:

        def write(connection: Connection) -> None:
            connection.execute(delete(_NOTES).where(_NOTES.c.run == self._run, _NOTES.c.name == name))
            connection.execute(insert(_NOTES).values(run=self._run, name=name, text=text))

        await self._execute(write)

    @override
    async def notes(self) -> Mapping[str, str]:
        query = select(_NOTES.c.name, _NOTES.c.text).where(_NOTES.c.run == self._run)
        return await self._execute(lambda connection: {row.name: row.text for row in connection.execute(query)})

    @override
    async def record(self, name: str) -> Record:
        query = select(_RECORDS.c.revision, _RECORDS.c.text).where(self._is_record(name))
        row = await self._execute(lambda connection: connection.execute(query).one_or_none())
        return Record(row.revision, row.text) if row is not None else Record()

    @override
    async def replace_record(self, name: str, revision: int, text: str) -> bool:
        values = {"revision": revision + 1, "text": text}
        changed = update(_RECORDS).where(self._is_record(name), _RECORDS.c.revision == revision).values(values)

        def write(connection: Connection) -> bool:
            if revision:
                return connection.execute(changed).rowcount == 1
            connection.execute(insert(_RECORDS).values(run=self._run, name=name, **values))
            return True

        try:
            return await self._execute(write)
        except TinsmithError as error:
            if isinstance(error.__cause__, IntegrityError):  # another process has inserted it
                return False
            raise

    @override
    async def close(self) -> None:
        await self._executor.run(self._engine.dispose)
        await self._executor.close()

    def _is_batch(self, number: int) -> ColumnElement[bool]:
        return (_BATCHES.c.run == self._run) & (_BATCHES.c.number == number)

    def _is_record(self, name: str) -> ColumnElement[bool]:
        return (_RECORDS.c.run == self._run) & (_RECORDS.c.name == name)

    async def _execute(self, function: Callable[[Connection], T]) -> T:
        """Run `function` in a transaction. Raises TinsmithError if the database fails."""

        def run() -> T:
            with self._engine.begin() as connection:
                return function(connection)

        try:
            return await self._executor.run(run)
        except SQLAlchemyError as error:
            raise TinsmithError(f"The database of the buffer failed: {str(error).splitlines()[0]}") from error


def _create_tables(engine: Engine) -> None:
    """Create missing tables. Another process may create them at the same time, which fails here; then look again."""
    try:
        _TABLES.create_all(engine)
    except (OperationalError, ProgrammingError, IntegrityError):
        _TABLES.create_all(engine)
