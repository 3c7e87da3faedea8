"""The store of a run: the batches that wait for training, and what its processes know of each other.

A store has batches by number, and one QueueState. A process changes the state by replacing it, which succeeds if no
other process has replaced it since it was read. A batch is stored together with the state that ends its claim. So no
task is drawn twice in an epoch and none is skipped, whichever process is killed at whichever instant: the batches that
a process has claimed stay those of its name, and a process of the same name continues them on any machine.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Literal, TypeVar

from pydantic import Field
from sqlalchemy import (
    URL,
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
from tinsmith.rl.rollouts.batch import BATCH, Batch, BatchInProgress
from tinsmith.settings import Settings

T = TypeVar("T")

POLL_SECONDS = 0.2
"""Longest time between two looks at the state."""
_AGAIN_S = 0.01
"""Time until the next attempt to replace the state."""
_SQLITE_WAIT_S = 60
"""Time that a statement waits for the lock of a SQLite file that another process holds."""


class WeightRecord(Settings):
    """Published weights."""

    step: int
    """Step after which the weights were published."""
    version: int
    path: str
    """Sampler checkpoint; empty for weights that are held in memory."""


class SamplerState(Settings):
    """A process that samples."""

    owner: str = ""
    """Random identity of the process that has the name; empty if none has."""
    state: Literal["under way", "ended", "failed"] = "under way"
    reason: str = ""
    """Error message of a failure."""
    wants: int | None = None
    """The process waits for weights newer than those of this step; the process that trains answers by null."""


class Claim(Settings):
    """A batch that a process has begun."""

    sampler: str
    """Name of the process."""
    batch: BatchInProgress
    """Its tasks; its groups only if it is from a checkpoint."""


class QueueState(Settings):
    """What the processes of a run know of each other."""

    next: int = 1
    """Number of the next batch that no process has begun."""
    claims: dict[int, Claim] = Field(default_factory=dict)
    """Batches by number that were begun and are not stored yet."""
    samplers: dict[str, SamplerState] = Field(default_factory=dict)
    """Processes that sample, by name."""
    cursor: int = 0
    """Training tasks drawn, if several processes may sample; otherwise the run's own state has the position."""
    order: dict[str, Any] = Field(default_factory=dict)
    """State of the task order, like `cursor`."""
    weights: tuple[WeightRecord, ...] = ()
    """Published weights, oldest first."""
    taken: int = 0
    """Batches that training has taken."""
    ended_at: int = 0
    """Last step of a finished run; 0 while training is running."""
    settings: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Settings that all processes must have in common, by process."""

    @property
    def done(self) -> int:
        """This batch and all earlier ones have been stored."""
        return min(self.claims, default=self.next) - 1

    @property
    def published(self) -> int:
        """Step of the newest weights; -1 if there are none."""
        return self.weights[-1].step if self.weights else -1

    @property
    def wanted(self) -> bool:
        """Whether a process that samples waits for newer weights."""
        return any(sampler.wants is not None for sampler in self.samplers.values())

    @property
    def failure(self) -> str:
        """Why sampling failed; empty if it did not."""
        failed = {name: sampler.reason for name, sampler in self.samplers.items() if sampler.state == "failed"}
        name, reason = next(iter(failed.items()), ("", ""))
        return f"{name}: {reason}" if len(self.samplers) > 1 and failed else reason

    @property
    def sampling_ended(self) -> bool:
        """Whether all processes that sampled have ended."""
        return bool(self.samplers) and all(sampler.state == "ended" for sampler in self.samplers.values())

    def is_closed(self, number: int) -> bool:
        """Whether a batch is stored, or was, and will not be stored again."""
        return number < self.next and number not in self.claims

    def claimed_by(self, sampler: str) -> list[int]:
        """Batches that the process of this name has begun."""
        return sorted(number for number, claim in self.claims.items() if claim.sampler == sampler)

    def with_sampler(self, name: str, **changes: Any) -> QueueState:
        """The state with other values of the process `name`."""
        changed = self.samplers.get(name, SamplerState()).model_copy(update=changes)
        return self.model_copy(update={"samplers": {**self.samplers, name: changed}})

    def with_answers(self) -> QueueState:
        """The state with all requests for newer weights answered."""
        samplers = {name: sampler.model_copy(update={"wants": None}) for name, sampler in self.samplers.items()}
        return self.model_copy(update={"samplers": samplers})


class Store(ABC):
    """Batches by number, and the state of the queue. In a durable store, a write is durable when the call returns.

    `changes` counts the changes that this process knows of: its own, and what it reports by `notify`.
    """

    durable: bool
    """Whether the batches outlive the process."""

    def __init__(self) -> None:
        self._event, self._updating = asyncio.Event(), asyncio.Lock()
        self.changes = 0

    @abstractmethod
    async def read(self) -> tuple[int, QueueState]:
        """The state, and the number of its replacements."""

    @abstractmethod
    async def compare_and_set(self, revision: int, state: QueueState, batches: Sequence[Batch] = ()) -> bool:
        """Replace the state of `revision`, and store batches under their numbers, or neither.

        False if the state has been replaced since.
        """

    @abstractmethod
    async def numbers(self) -> Collection[int]:
        """Numbers of the stored batches."""

    @abstractmethod
    async def get(self, number: int) -> Batch:
        """The batch with `number`, which must be stored."""

    @abstractmethod
    async def drop(self, numbers: Collection[int]) -> None:
        """Delete batches; numbers that are not stored are ignored."""

    @abstractmethod
    async def close(self) -> None:
        """Close files and connections."""

    async def state(self) -> QueueState:
        """The state."""
        return (await self.read())[1]

    async def update(
        self, change: Callable[[QueueState], QueueState | None], batches: Sequence[Batch] = ()
    ) -> QueueState:
        """Replace the state by `change` of it, and store batches with it; returns the state.

        `change` may be called several times, if others replace the state meanwhile. If it returns None, nothing is
        replaced or stored.
        """
        async with self._updating:
            while True:
                revision, state = await self.read()
                if (changed := change(state)) is None:
                    return state
                if await self.compare_and_set(revision, changed, batches):
                    self.notify()
                    return changed
                await asyncio.sleep(_AGAIN_S)

    async def agree(self, process: str, settings: Mapping[str, Any]) -> None:
        """Compare the settings of this process with those of the others, and store them.

        `process`: train, explore or explore-NAME. Raises ConfigError that names another process and the keys.
        """

        def compare(state: QueueState) -> QueueState:
            for other, values in state.settings.items():
                common = settings.keys() & values.keys() if other != process else ()
                if different := sorted(key for key in common if settings[key] != values[key]):
                    raise ConfigError(
                        f"The process {other} of this run differs in {', '.join(different)}.",
                        "Set the same values for all processes of the run, or another buffer.run or buffer.path for a "
                        "new run.",
                    )
            return state.model_copy(update={"settings": {**state.settings, process: dict(settings)}})

        await self.update(compare)

    def notify(self) -> None:
        """Wake everyone in this process who waits for a change."""
        self.changes += 1
        self._event.set()
        self._event = asyncio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds; it is checked after every change."""
        while not condition():
            await self._event.wait()

    async def wait(self, seen: int) -> None:
        """Wait until there are more changes than the `seen` ones, but at most until the next look at the state."""
        if self.changes == seen:
            with suppress(TimeoutError):  # asyncio.wait_for of Python 3.11 may swallow a cancellation
                async with asyncio.timeout(POLL_SECONDS):
                    await self._event.wait()


class MemoryStore(Store):
    """Store of a run in one process. A resumed run restores it from its saved state."""

    def __init__(self, disk: SqlStore | None = None) -> None:
        """`disk` keeps the batches, in place of memory."""
        super().__init__()
        self._disk, self.durable = disk, disk is not None
        self._revision, self._state = 0, QueueState()
        self._batches: dict[int, Batch] = {}

    @override
    async def read(self) -> tuple[int, QueueState]:
        return self._revision, self._state

    @override
    async def compare_and_set(self, revision: int, state: QueueState, batches: Sequence[Batch] = ()) -> bool:
        if revision == self._revision and self._disk and batches:
            await self._disk.put(batches)
        if revision != self._revision:
            return False
        self._revision, self._state = revision + 1, state
        if not self._disk:
            self._batches.update({batch.step: batch for batch in batches})
        return True

    @override
    async def numbers(self) -> Collection[int]:
        return await self._disk.numbers() if self._disk else self._batches.keys()

    @override
    async def get(self, number: int) -> Batch:
        return await self._disk.get(number) if self._disk else self._batches[number]

    @override
    async def drop(self, numbers: Collection[int]) -> None:
        if self._disk:
            await self._disk.drop(numbers)
        for number in numbers:
            self._batches.pop(number, None)

    @override
    async def close(self) -> None:
        if self._disk:
            await self._disk.close()


_TABLES = MetaData()
_BATCHES = Table(
    "rl_batches",
    _TABLES,
    Column("run", String(200), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("batch", Text, nullable=False),
)
_QUEUES = Table(
    "rl_queues",
    _TABLES,
    Column("run", String(200), primary_key=True),
    Column("revision", Integer, nullable=False),
    Column("state", Text, nullable=False),
)


class SqlStore(Store):
    """Store in a database that the processes of a run share. Statements run in order in a thread of their own."""

    durable = True

    def __init__(self, url: str | URL, run: str) -> None:
        """Open the database and create missing tables. Raises ConfigError if it cannot be opened."""
        super().__init__()
        self._run, self._thread = run, ThreadPoolExecutor(1, thread_name_prefix="buffer")
        self._newest = 0, QueueState()
        try:
            waits = {"timeout": _SQLITE_WAIT_S} if str(url).startswith("sqlite") else {}
            self._engine = create_engine(url, pool_pre_ping=True, connect_args=waits)
            _create_tables(self._engine)
        except (SQLAlchemyError, ArgumentError, NoSuchModuleError, ImportError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"buffer.url: cannot open the database: {reason}", "Check the URL.") from error

    @override
    async def read(self) -> tuple[int, QueueState]:
        own = _QUEUES.c.run == self._run
        revision, state = self._newest

        def look(connection: Connection) -> tuple[int, str] | None:
            if connection.execute(select(_QUEUES.c.revision).where(own)).scalar() in (None, revision):
                return None
            row = connection.execute(select(_QUEUES.c.revision, _QUEUES.c.state).where(own)).one()
            return row.revision, row.state

        if (changed := await self._execute(look)) is not None:
            revision, state = changed[0], QueueState.model_validate_json(changed[1])
            self._newest = revision, state
        return revision, state

    @override
    async def compare_and_set(self, revision: int, state: QueueState, batches: Sequence[Batch] = ()) -> bool:
        values, rows = {"revision": revision + 1, "state": state.model_dump_json()}, self._rows(batches)
        replaced = update(_QUEUES).where(_QUEUES.c.run == self._run, _QUEUES.c.revision == revision).values(values)

        def write(connection: Connection) -> bool:
            if not revision:
                connection.execute(insert(_QUEUES).values(run=self._run, **values))
            elif connection.execute(replaced).rowcount != 1:
                return False
            self._write(connection, rows)
            return True

        try:
            written = await self._execute(write)
        except TinsmithError as error:
            if not revision and isinstance(error.__cause__, IntegrityError):  # another process has inserted it
                return False
            raise
        if written:
            self._newest = revision + 1, state
        return written

    async def put(self, batches: Sequence[Batch]) -> None:
        """Store batches alone, for a run whose state is not in the database."""
        rows = self._rows(batches)
        await self._execute(lambda connection: self._write(connection, rows))

    @override
    async def numbers(self) -> Collection[int]:
        query = select(_BATCHES.c.number).where(_BATCHES.c.run == self._run)
        return await self._execute(lambda connection: list(connection.execute(query).scalars()))

    @override
    async def get(self, number: int) -> Batch:
        query = select(_BATCHES.c.batch).where(self._among([number]))
        return BATCH.validate_json(await self._execute(lambda connection: connection.execute(query).scalar_one()))

    @override
    async def drop(self, numbers: Collection[int]) -> None:
        statement = delete(_BATCHES).where(self._among(numbers))
        if numbers:
            await self._execute(lambda connection: connection.execute(statement))

    @override
    async def close(self) -> None:
        await self._run_in_thread(self._engine.dispose)
        await asyncio.to_thread(self._thread.shutdown)

    def _rows(self, batches: Sequence[Batch]) -> list[dict[str, Any]]:
        return [{"run": self._run, "number": batch.step, "batch": BATCH.dump_json(batch).decode()} for batch in batches]

    def _write(self, connection: Connection, rows: list[dict[str, Any]]) -> None:
        """Replace the rows of batches."""
        if rows:
            connection.execute(delete(_BATCHES).where(self._among([row["number"] for row in rows])))
            connection.execute(insert(_BATCHES), rows)

    def _among(self, numbers: Collection[int]) -> ColumnElement[bool]:
        return (_BATCHES.c.run == self._run) & _BATCHES.c.number.in_(list(numbers))

    async def _execute(self, function: Callable[[Connection], T]) -> T:
        """Run `function` in a transaction. Raises TinsmithError if the database fails."""

        def run() -> T:
            with self._engine.begin() as connection:
                return function(connection)

        try:
            return await self._run_in_thread(run)
        except SQLAlchemyError as error:
            raise TinsmithError(f"The database of the buffer failed: {str(error).splitlines()[0]}") from error

    async def _run_in_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)


def _create_tables(engine: Engine) -> None:
    """Create missing tables. Another process may create them at the same time, which fails here; then look again."""
    try:
        _TABLES.create_all(engine)
    except (OperationalError, ProgrammingError, IntegrityError):
        _TABLES.create_all(engine)
