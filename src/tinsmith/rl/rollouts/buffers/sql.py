"""Batches as rows of a database that a sampling and a training process share, on any two machines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, TypeVar

from pydantic import Field, TypeAdapter
from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    create_engine,
    delete,
    insert,
    select,
)
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

from tinsmith.errors import ConfigError, TinsmithError
from tinsmith.rl.rollouts.buffers.replay import BufferSettings
from tinsmith.rl.rollouts.producer import Batch

T = TypeVar("T")


class SerialExecutor:
    """Runs functions one after the other in a thread of its own."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="buffer")

    async def do(self, piece: Callable[[], T]) -> T:
        """Run `piece` after all earlier ones and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, piece)

    async def close(self) -> None:
        """Wait for all functions."""
        await asyncio.to_thread(self._thread.shutdown)


_BATCH = TypeAdapter(Batch)
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


class SqlConfig(BufferSettings):
    """Batches in a database, which outlives the process and which other processes can open."""

    type: Literal["sql"] = "sql"
    url: str
    """SQLAlchemy URL: sqlite:///FILE, or postgresql+psycopg://USER:PASSWORD@HOST/NAME."""
    run: str = Field(default="", max_length=200)
    """Name of the rows, the same in both processes; empty: the name of the run."""


class SqlBuffer:
    """Implements `base.Buffer`; statements run in a thread."""

    durable = True

    def __init__(self, url: str, run: str) -> None:
        """Makes the tables where they are missing. Raises ConfigError where the database cannot be opened."""
        self._run, self._turn = run, SerialExecutor()
        try:
            self._engine = create_engine(url)
            _TABLES.create_all(self._engine)
        except (SQLAlchemyError, ArgumentError, NoSuchModuleError, ImportError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"buffer.url: the database cannot be opened: {reason}", "Check the URL.") from error

    async def put(self, batch: Batch) -> None:
        """Committed when this returns."""
        body = _BATCH.dump_json(batch).decode()

        def write(connection: Connection) -> None:
            connection.execute(delete(_BATCHES).where(self._batch(batch.step)))
            connection.execute(insert(_BATCHES).values(run=self._run, number=batch.step, batch=body))

        await self._do(write)

    async def numbers(self) -> Collection[int]:
        """Of the rows that are there now."""
        query = select(_BATCHES.c.number).where(_BATCHES.c.run == self._run)
        return await self._do(lambda connection: list(connection.execute(query).scalars()))

    async def get(self, number: int) -> Batch:
        """Read from the database on each call."""
        query = select(_BATCHES.c.batch).where(self._batch(number))
        return _BATCH.validate_json(await self._do(lambda connection: connection.execute(query).scalar_one()))

    async def drop(self, numbers: Collection[int]) -> None:
        """The rows go."""
        gone = delete(_BATCHES).where(_BATCHES.c.run == self._run, _BATCHES.c.number.in_(list(numbers)))
        if numbers:
            await self._do(lambda connection: connection.execute(gone))

    async def note(self, name: str, text: str) -> None:
        """Committed when this returns."""

        def write(connection: Connection) -> None:
            connection.execute(delete(_NOTES).where(_NOTES.c.run == self._run, _NOTES.c.name == name))
            connection.execute(insert(_NOTES).values(run=self._run, name=name, text=text))

        await self._do(write)

    async def notes(self) -> Mapping[str, str]:
        """Those that are there now."""
        query = select(_NOTES.c.name, _NOTES.c.text).where(_NOTES.c.run == self._run)
        return await self._do(lambda connection: {row.name: row.text for row in connection.execute(query)})

    async def close(self) -> None:
        """Lets go of the connections."""
        await self._turn.do(self._engine.dispose)
        await self._turn.close()

    def _batch(self, number: int) -> ColumnElement[bool]:
        return (_BATCHES.c.run == self._run) & (_BATCHES.c.number == number)

    async def _do(self, work: Callable[[Connection], T]) -> T:
        def run() -> T:
            with self._engine.begin() as connection:
                return work(connection)

        try:
            return await self._turn.do(run)
        except SQLAlchemyError as error:
            raise TinsmithError(f"The buffer's database failed: {str(error).splitlines()[0]}") from error
