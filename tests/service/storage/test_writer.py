"""Writes in groups: one commit for all that wait, errors and cancellations of single writes."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import Connection, event, text
from sqlalchemy.exc import DBAPIError, OperationalError

from tests.service.storage.test_store import MODEL, SESSION, WORKS
from tests.service.support.databases import opened
from tests.service.support.inprocess import until
from tinsmith.service.storage import writer
from tinsmith.service.storage.payloads import encode_operation, queued_request
from tinsmith.service.storage.records import FutureResult, QueuedRequest, Session
from tinsmith.service.storage.store import FinishedRequest, Store

PAYLOAD = encode_operation(WORKS[0])


def request(seq: int) -> QueuedRequest:
    return queued_request(f"{MODEL.id}:{seq}", "o", MODEL.id, seq, seq, WORKS[0])


def session(name: str) -> Session:
    return replace(SESSION, id=name)


def count_commits(store: Store) -> Callable[[], int]:
    """Function that returns the number of commits since this call."""
    commits: list[object] = []
    event.listen(store._sync_engine, "commit", commits.append)
    return lambda: len(commits)


def test_concurrent_writes_share_a_commit(tmp_path: Path) -> None:
    """Break `_drain`: take one write at a time."""

    async def main() -> None:
        async with opened(tmp_path) as store:
            await store.put(MODEL)
            commits = count_commits(store)
            assert all(await asyncio.gather(*(store.accept(request(seq), PAYLOAD) for seq in range(200))))
            assert commits() <= 2
            finished = [FinishedRequest(request=request(seq), result=FutureResult(body=b"x")) for seq in range(200)]
            await asyncio.gather(*(store.finish([end]) for end in finished))
            assert commits() <= 4
            assert [(await store.result(request(seq).id, "o")) for seq in (0, 199)] == [
                ("done", FutureResult(body=b"x"))
            ] * 2

    asyncio.run(main())


def test_writes_arriving_during_a_commit_share_the_next(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as store:
            begun, gate = threading.Event(), threading.Event()

            def hold(_db: object) -> None:
                begun.set()
                gate.wait(120)

            event.listen(store._sync_engine, "commit", hold)
            commits = count_commits(store)
            first = asyncio.create_task(store.put(session("first")))
            await asyncio.to_thread(begun.wait, 120)
            others = [asyncio.create_task(store.put(session(str(number)))) for number in range(20)]
            await asyncio.sleep(0)
            assert store.all(Session) == [], "memory does not run ahead of the commit"
            gate.set()
            await asyncio.gather(first, *others)
            assert commits() == 2
            assert [each.id for each in store.all(Session)] == ["first", *map(str, range(20))]

    asyncio.run(main())


def test_write_with_an_error_fails_alone(tmp_path: Path) -> None:
    """Break `_execute`: without the second attempt, all writes of the group fail."""

    async def main() -> None:
        async with opened(tmp_path) as store:
            outcomes = await asyncio.gather(
                store.put(session("a")),
                store.write(lambda db: db.execute(text("insert into no_such_table values (1)"))),
                store.update(Session, "a", display_name="b"),
                store.write(lambda db: 1 // 0),
                store.accept(request(1), PAYLOAD, MODEL),
                return_exceptions=True,
            )
            assert [type(outcome) for outcome in outcomes if isinstance(outcome, Exception)][1:] == [ZeroDivisionError]
            assert isinstance(outcomes[1], DBAPIError)
            assert (outcomes[0], outcomes[4]) == (None, True)
            assert store.find(Session, "a") == replace(session("a"), display_name="b")
        async with opened(tmp_path) as store:
            assert store.find(Session, "a") == replace(session("a"), display_name="b")
            assert [each.id for each in await store.pending_requests()] == [request(1).id]

    asyncio.run(main())


def test_disk_error_in_a_savepoint_repeats_the_whole_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Break `is_transient`: look at the error alone, which then is that of leaving the savepoint.

    At a disk error SQLite rolls the transaction back by itself. What would be written after it would be committed.
    """
    monkeypatch.setattr(writer, "RETRY_S", 0.01)
    faults = 0

    async def main() -> None:
        def fail(db: Connection, cursor: object, statement: str, *_: object) -> None:
            nonlocal faults
            if statement.startswith("INSERT INTO requests") and db.in_nested_transaction() and not faults:
                faults += 1
                assert db.connection.driver_connection is not None
                db.connection.driver_connection.execute("ROLLBACK")
                error = sqlite3.OperationalError("disk I/O error")
                error.sqlite_errorcode = sqlite3.SQLITE_IOERR
                raise OperationalError(statement, {}, error)

        async with opened(tmp_path) as store:
            await store.put(MODEL)
            event.listen(store._sync_engine, "before_cursor_execute", fail)
            outcomes = await asyncio.gather(
                store.put(session("a")),
                store.put(replace(session("b"), metadata={"a": object()})),  # so the group is repeated in parts
                store.accept(request(1), PAYLOAD),
                store.put(session("c")),
                return_exceptions=True,
            )
            assert faults == 1
            assert [isinstance(outcome, Exception) for outcome in outcomes] == [False, True, False, False]
        async with opened(tmp_path) as store:
            assert [store.find(Session, name) is not None for name in "abc"] == [True, False, True]
            assert [each.id for each in await store.pending_requests()] == [request(1).id]

    asyncio.run(main())


def test_failed_update_leaves_no_trace_in_later_ones(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as store:
            await store.put(SESSION)
            unstorable = {"metadata": {"a": object()}}
            failed, later = await asyncio.gather(
                store.update(Session, "s", **unstorable), store.update(Session, "s", seen=9.0), return_exceptions=True
            )
            assert isinstance(failed, Exception)
            assert later == store.find(Session, "s") == replace(SESSION, seen=9.0)

    asyncio.run(main())


def test_request_accepted_twice_at_once_is_stored_once(tmp_path: Path) -> None:
    """Its records are those of the first."""

    async def main() -> None:
        async with opened(tmp_path) as store:
            accepted = await asyncio.gather(
                *(store.accept(request(1), PAYLOAD, session(str(number))) for number in range(3)),
                store.accept(request(2), PAYLOAD),
            )
            assert accepted == [True, False, False, True]
            assert [each.id for each in store.all(Session)] == ["0"]
            assert len(await store.pending_requests()) == 2
            assert not await store.accept(request(1), PAYLOAD, session("late"))
            assert store.find(Session, "late") is None

    asyncio.run(main())


@pytest.mark.only_on("sqlite")
def test_cancelled_caller_withdraws_a_waiting_write(tmp_path: Path) -> None:
    """A locked database cannot be written; `write` says so at once, and a cancelled `put` does not come later."""

    async def main() -> None:
        async with opened(tmp_path) as store:
            with store._sync_engine.connect() as db:
                db.exec_driver_sql("PRAGMA busy_timeout=10")
            other = sqlite3.connect(tmp_path / "tinsmith.db", isolation_level=None)
            other.execute("BEGIN IMMEDIATE")
            assert store.is_available
            cancelled = asyncio.create_task(store.put(session("cancelled")))
            patient = asyncio.create_task(store.put(session("patient")))
            await until(lambda: not store.is_available)
            with pytest.raises(DBAPIError, match="locked"):
                await store.write(lambda db: db.execute(text("select 1")))
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                async with asyncio.timeout(120):
                    await cancelled
            other.execute("COMMIT")
            other.close()
            await patient
            assert store.is_available
            assert [each.id for each in store.all(Session)] == ["patient"]

    asyncio.run(main())


def test_marks_without_a_caller_go_with_the_next_write(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as store:
            await store.put(MODEL)
            await store.accept(request(1), PAYLOAD)
            commits = count_commits(store)
            store.mark_fetched(request(1).id)
            await asyncio.sleep(0.01)
            assert commits() == 0
            await store.put(SESSION)
            assert commits() == 1
            store.mark_fetched(request(1).id)
        async with opened(tmp_path) as store, store.database.connect() as db:
            assert (await db.execute(text("select fetched from requests"))).scalar_one() is not None

    asyncio.run(main())
