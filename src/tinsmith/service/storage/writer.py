"""Writes in groups: all writes that wait share one transaction, and so one sync of the disk.

One thread executes the transactions, one after another. A write that finds no other goes at once. A write that fails
with an error of its own fails alone: its group runs again with a savepoint for each write.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, select
from sqlalchemy.exc import DBAPIError

from tinsmith.service.storage.batch import Batch, Write
from tinsmith.service.storage.database import RETRY_S, described, display_url, is_full_disk, is_transient
from tinsmith.service.storage.memory import Changes, Records
from tinsmith.service.storage.payload_files import PayloadFiles
from tinsmith.service.storage.tables import PAYLOADS

log = logging.getLogger(__name__)

R = TypeVar("R")
GROUP = 1000
"""Largest number of writes in one transaction."""


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """A write, and what its caller waits for; None for one that nobody waits for."""

    write: Write[Any]
    done: asyncio.Future[None] | None


class GroupWriter:
    """The writes of one store. `records` changes after each commit, in the order of the writes."""

    def __init__(self, engine: Engine, records: Records, files: PayloadFiles | None) -> None:
        self._engine = engine.execution_options(exclusive=True)
        self._records = records
        self._files = files
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._connection: Connection | None = None
        """Of SQLite, for all transactions; only the thread uses it."""
        self._waiting: deque[_Waiting] = deque()
        self._running: Sequence[_Waiting] = ()
        self._transaction: asyncio.Future[Changes] | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_closing = False
        self.is_available = True
        """Whether the last transaction reached the database and its disk."""
        self.on_full_disk: Callable[[], None] = lambda: None
        """Called when a transaction found the disk full, before it is repeated."""

    async def submit(self, write: Write[R]) -> R:
        """Execute a write. It waits while the database is unavailable, unless it says otherwise.

        A cancelled caller waits for the end of a transaction that has begun; a write that is not done is withdrawn.
        """
        done = asyncio.get_running_loop().create_future()
        entry = _Waiting(write, done)
        self._waiting.append(entry)
        if self._task is None:
            self._task = asyncio.create_task(self._drain())
        try:
            await done
        except asyncio.CancelledError:
            if entry in self._running and self._transaction is not None:
                await asyncio.gather(asyncio.shield(self._transaction), return_exceptions=True)
            if entry in self._waiting:
                self._waiting.remove(entry)
            raise
        if write.error is not None:
            raise described(write.error) from write.error
        return write.result

    def submit_later(self, write: Write[Any]) -> None:
        """Execute a write together with the next one that somebody waits for."""
        self._waiting.append(_Waiting(write, None))

    async def close(self) -> None:
        """Wait for the running transaction; write what nobody waits for, if the database is available."""
        self._is_closing = True
        if self._waiting:
            with suppress(DBAPIError, OSError):
                await self.submit(Write(apply=lambda batch: None, waits=False))
        if self._task is not None:
            await asyncio.wait([self._task])
        self._thread.submit(self._close_connection)
        self._thread.shutdown(wait=True)

    async def _drain(self) -> None:
        """Execute groups until nobody waits for a write."""
        loop = asyncio.get_running_loop()
        try:
            while any(entry.done is not None for entry in self._waiting):
                self._running = group = [self._waiting.popleft() for _ in range(min(GROUP, len(self._waiting)))]
                self._transaction = loop.run_in_executor(self._thread, self._execute, [each.write for each in group])
                await asyncio.wait([self._transaction])
                error = self._transaction.exception()
                if error is None:
                    self.is_available = True
                    self._records.apply(self._transaction.result())
                    _resolve(group)
                elif self._postpone(error):
                    await asyncio.sleep(RETRY_S)
                self._running = ()
        finally:
            self._task, self._running = None, ()

    def _postpone(self, error: BaseException) -> bool:
        """Return the writes that wait for the database to the queue, and fail the others. Whether any waits."""
        group, self._running = self._running, ()
        is_transient_error = is_transient(self._engine, error)
        if is_transient_error:
            self.is_available = False
            reason = error.orig if isinstance(error, DBAPIError) else error
            log.warning("%s cannot be written: %s", display_url(self._engine), reason)
        if is_full_disk(error):
            self.on_full_disk()
        stays = [each for each in group if is_transient_error and each.write.waits and not self._is_closing]
        failed = [each for each in group if each not in stays]
        for entry in failed:
            entry.write.error = error
        _resolve(failed)
        self._waiting.extendleft(reversed(stays))
        return bool(stays)

    # In the thread.

    def _execute(self, writes: Sequence[Write[Any]]) -> Changes:
        """Execute a group, and again with a savepoint for each write if that fails. Raises what all must wait for."""
        for write in writes:
            write.error = None
        try:
            return self._execute_in_parts([writes])
        except Exception as error:
            if is_transient(self._engine, error):
                raise
        return self._execute_in_parts([[write] for write in writes], savepoints=True)

    def _execute_in_parts(self, parts: Sequence[Sequence[Write[Any]]], *, savepoints: bool = False) -> Changes:
        changes: Changes = {}
        used: Sequence[int] | None = None
        with self._begun() as db:
            dropped_files = False
            for part in parts:
                batch = Batch(db, self._records, self._files, changes)
                try:
                    with db.begin_nested() if savepoints else nullcontext():
                        batch.run(part, is_alone=savepoints)
                except Exception as error:
                    if not savepoints or is_transient(self._engine, error):
                        raise
                    part[0].error = error
                    continue
                changes |= batch.changed
                dropped_files |= batch.dropped_files
            if self._files is not None:
                self._files.sync()  # before the commit of the rows that refer to them
                used = segments_in_use(db) if dropped_files else None
        if self._files is not None and used is not None:
            with suppress(OSError):  # the next removal, or the next start, removes them
                self._files.remove_all_but(used)
        return changes

    @contextmanager
    def _begun(self) -> Iterator[Connection]:
        """A transaction. That of SQLite is on one connection for all, which takes half the time of another from the
        pool for each; a server's may be closed meanwhile, which the pool finds out."""
        if self._engine.dialect.name != "sqlite":
            with self._engine.begin() as db:
                yield db
            return
        if self._connection is None:
            self._connection = self._engine.connect()
        try:
            with self._connection.begin():
                yield self._connection
        except BaseException:
            self._close_connection()
            raise

    def _close_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def segments_in_use(db: Connection) -> Sequence[int]:
    """The payload files that rows refer to."""
    return db.execute(select(PAYLOADS.c.segment).distinct()).scalars().all()


def _resolve(group: Sequence[_Waiting]) -> None:
    for entry in group:
        if entry.done is not None and not entry.done.done():
            entry.done.set_result(None)
