"""Store: round trips, concurrent writes, lost databases and errors."""

from __future__ import annotations

import asyncio
import resource
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import create_engine, event, text
from sqlalchemy.exc import OperationalError

from tests.service.support.databases import url_of
from tinsmith.engine.base import AdamParams, LoraSpec
from tinsmith.errors import BadRequest
from tinsmith.service.storage.payloads import encode_operation, queued_request
from tinsmith.service.storage.records import (
    Checkpoint,
    FutureResult,
    LoadWeights,
    Model,
    OptimStep,
    SamplingSession,
    SaveExternal,
    SaveSampler,
    SaveState,
    Session,
)
from tinsmith.service.storage.retention import Retention, prune
from tinsmith.service.storage.store import FinishedRequest, open_store

SESSION = Session(id="s", owner="o", created=1.0, seen=2.0, tags=["a"], metadata={"b": [1]})
MODEL = Model(
    id="s:train:0", owner="o", session_id="s", base_model="toy", lora=LoraSpec(rank=4, seed=2**62), created=1.0
)
SAMPLER = SamplingSession(id="s:sample:0", owner="o", session_id="s", base_model="toy", created=1.0)
CHECKPOINT = Checkpoint(
    id="c", owner="o", run=MODEL.id, kind="weights", name="n", base_model="toy", lora=MODEL.lora, created=1.0,
    made_by="r", metadata={"k": "v"},
)  # fmt: skip
WORKS = (
    OptimStep(adam=AdamParams(eps=1e-8)),
    LoadWeights(path="tinker://a/weights/b", checkpoint="c", optimizer=True),
    SaveState(name="n", ttl_seconds=3600),
    SaveSampler(sampler_id="x"),
    SaveExternal(name="e", ttl_seconds=3600, recipients=["age1"]),
)


def test_records_and_requests_are_read_back(tmp_path: Path) -> None:
    async def main() -> None:
        store = await open_store(tmp_path, url_of(tmp_path))
        await store.put(SESSION, MODEL, SAMPLER, CHECKPOINT)
        await store.put(replace(MODEL, covered=2**40))
        for seq, work in enumerate(WORKS, 1):
            row = queued_request(f"{MODEL.id}:{seq}", "o", MODEL.id, seq, seq, work)
            assert await store.accept(row, encode_operation(work))
            assert not await store.accept(row, encode_operation(work))
        await store.close()
        store = await open_store(tmp_path, url_of(tmp_path))
        assert store.all(Session) == [SESSION]
        assert store.all(Model) == [replace(MODEL, covered=2**40)]
        assert (store.find(SamplingSession, SAMPLER.id), store.find(Checkpoint, "c")) == (SAMPLER, CHECKPOINT)
        assert tuple(row.operation for row in await store.pending_requests()) == WORKS
        assert await store.highest_seqs() == {MODEL.id: (5, -1)}
        await store.close()

    asyncio.run(main())


def test_results_are_private_and_covered_payloads_are_deleted(tmp_path: Path) -> None:
    async def main() -> None:
        store = await open_store(tmp_path, url_of(tmp_path))
        await store.put(MODEL)
        rows = [queued_request(f"r{seq}", "o", MODEL.id, seq, seq, WORKS[0]) for seq in (1, 2, 3)]
        for row in rows:
            await store.accept(row, encode_operation(row.operation))
        await store.finish([FinishedRequest(request=row, result=FutureResult(body=b"x"), batch=7) for row in rows[:2]])
        assert await store.result("r1", "o") == ("done", FutureResult(body=b"x"))
        assert await store.result("r1", "another") is None
        assert await store.result("r3", "o") == ("pending", None)
        assert [(request.seq, request.batch) for request in await store.requests_to_replay(MODEL)] == [(1, 7), (2, 7)]
        covered = replace(MODEL, covered=1)
        await store.cover(covered)
        assert [request.seq for request in await store.requests_to_replay(covered)] == [2]
        assert [row.id for row in await store.pending_requests()] == ["r3"]
        await store.close()

    asyncio.run(main())


def test_checkpoints_of_a_run_follow_updates_and_removals(tmp_path: Path) -> None:
    async def main() -> None:
        store = await open_store(tmp_path, url_of(tmp_path))
        others = replace(CHECKPOINT, id="d", run="other")
        younger = replace(CHECKPOINT, id="e", created=2.0)
        await store.put(SESSION, CHECKPOINT, others)
        await store.put(younger)
        changed = await store.update(Checkpoint, "c", public=True)
        assert store.checkpoints_of_run(MODEL.id) == [changed, younger]
        await store.remove(younger)
        assert (
            store.checkpoints_of_run(MODEL.id),
            store.checkpoints_of_run("other"),
            store.checkpoints_of_run("none"),
        ) == ([changed], [others], [])
        await store.close()
        store = await open_store(tmp_path, url_of(tmp_path))
        assert (store.checkpoints_of_run(MODEL.id), store.checkpoints_of_run("other")) == ([changed], [others])
        await store.close()

    asyncio.run(main())


def test_last_used_takes_any_number_of_models(tmp_path: Path, database: str) -> None:
    count = 70_000 if database == "postgresql" else 260_000  # beyond the parameters that a statement may have

    async def main() -> None:
        store = await open_store(tmp_path, url_of(tmp_path))
        await store.put(MODEL)
        await store.accept(queued_request("r1", "o", MODEL.id, 1, 1, WORKS[0]), encode_operation(WORKS[0]))
        other = replace(MODEL, id="other", used=7.0)
        times = await store.last_used([other, *[MODEL] * count])
        assert times[0] == 7.0
        assert min(times[1:]) > MODEL.created
        await store.close()

    asyncio.run(main())


def test_concurrent_updates_are_all_applied(tmp_path: Path) -> None:
    async def main() -> None:
        store = await open_store(tmp_path, url_of(tmp_path))
        await store.put(SESSION, CHECKPOINT)
        await asyncio.gather(
            store.update(Checkpoint, "c", ready=False),
            store.update(Checkpoint, "c", size_bytes=5),
            store.update(Session, "s", seen=9.0),
            *(store.put(replace(SAMPLER, id=str(number))) for number in np.arange(20)),
        )
        assert store.find(Checkpoint, "c") == replace(CHECKPOINT, ready=False, size_bytes=5)
        await store.remove(CHECKPOINT)
        assert await store.update(Checkpoint, "c", size_bytes=6) is None
        assert len(store.all(SamplingSession)) == 20
        await store.close()

    asyncio.run(main())


@pytest.mark.only_on("postgresql")
def test_writes_wait_for_a_lost_database(tmp_path: Path) -> None:
    """Connections are closed during each kind of write and refused for a while."""
    url = url_of(tmp_path) or ""
    name = url.rpartition("/")[2]
    elsewhere = create_engine(url.replace(name, "postgres"), isolation_level="AUTOCOMMIT")

    def admin(*statements: str) -> None:
        with elsewhere.connect() as db:
            for statement in statements:
                db.execute(text(statement))

    away = f"select pg_terminate_backend(pid) from pg_stat_activity where datname = '{name}'"

    async def main() -> None:
        store = await open_store(tmp_path, url)
        await store.put(SESSION, MODEL)
        row = queued_request(f"{MODEL.id}:1", "o", MODEL.id, 1, 1, WORKS[0])
        await asyncio.to_thread(admin, f"alter database {name} allow_connections false", away)
        accepted = asyncio.create_task(store.accept(row, encode_operation(row.operation)))
        query = asyncio.create_task(store.result(row.id, "o"))
        done, _ = await asyncio.wait({accepted, query}, timeout=1.5)
        assert not done, "the write waits"
        await asyncio.to_thread(admin, f"alter database {name} allow_connections true")
        assert await accepted
        await query
        await asyncio.to_thread(admin, away)
        await store.finish([FinishedRequest(request=row, result=FutureResult(body=b"x"))])
        await asyncio.to_thread(admin, away)
        assert await store.result(row.id, "o") == ("done", FutureResult(body=b"x"))
        await store.put(SAMPLER)
        await asyncio.to_thread(admin, away)
        await store.remove(SAMPLER)
        await asyncio.to_thread(admin, away)
        await store.cover(replace(MODEL, covered=1))
        await asyncio.to_thread(admin, away)
        await store.put(replace(MODEL, state="ended"))
        await asyncio.to_thread(admin, away)
        await prune(store, Retention(fetched_s=1.0, ended_s=1.0), 1e12)
        assert await store.result(row.id, "o") is None
        await store.close()

    asyncio.run(main())
    elsewhere.dispose()


@pytest.mark.only_on("sqlite")
def test_sqlite_commits_are_synchronous(tmp_path: Path) -> None:
    """The default of SQLite in WAL mode loses the last commits in a power failure."""

    async def main() -> None:
        store = await open_store(tmp_path)
        with store._sync_engine.connect() as db:
            assert db.exec_driver_sql("PRAGMA synchronous").scalar_one() == 2, "FULL"
        await store.close()

    asyncio.run(main())


@pytest.mark.only_on("sqlite")
@pytest.mark.parametrize("fault", ["locked", "full"])
def test_writes_wait_for_an_unwritable_database_file(tmp_path: Path, fault: str) -> None:
    def arrange(kind: str) -> Callable[[], None]:
        """Cause the fault. Returns a function that ends it."""
        if kind == "locked":
            other = sqlite3.connect(tmp_path / "tinsmith.db", isolation_level=None, check_same_thread=False)
            other.execute("BEGIN IMMEDIATE")
            return lambda: (other.execute("COMMIT"), other.close())
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
        return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit)

    async def main() -> None:
        store = await open_store(tmp_path)
        with store._sync_engine.connect() as db:
            db.exec_driver_sql("PRAGMA busy_timeout=10")
        await store.put(SESSION, MODEL)
        row = queued_request("r1", "o", MODEL.id, 1, 1, WORKS[0])
        assert await store.accept(row, encode_operation(row.operation))
        end = arrange(fault)
        try:
            finishing = asyncio.create_task(
                store.finish([FinishedRequest(request=row, result=FutureResult(body=b"x" * 2**16))])
            )
            done, _ = await asyncio.wait({finishing}, timeout=0.7)
            assert not done, "the write waits"
        finally:
            end()
        await finishing
        assert await store.result("r1", "o") == ("done", FutureResult(body=b"x" * 2**16))
        await store.close()

    asyncio.run(main())


@pytest.mark.only_on("sqlite")
def test_permanent_database_errors_are_raised(tmp_path: Path) -> None:
    async def main() -> None:
        store = await open_store(tmp_path)
        with store._sync_engine.begin() as db:
            db.exec_driver_sql("drop table models")
        with pytest.raises(OperationalError, match="no such table"):
            await store.put(MODEL)
        await store.close()

    asyncio.run(main())


@pytest.mark.only_on("postgresql")
def test_accept_survives_a_lost_commit_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit succeeds and its confirmation is lost."""

    async def main() -> None:
        store = await open_store(tmp_path, url_of(tmp_path))
        row = queued_request("r1", "o", MODEL.id, 1, 1, WORKS[0])
        attempts = 0
        execute = store._writer._execute

        def lose_the_answer(writes):
            nonlocal attempts
            attempts += 1
            result = execute(writes)
            if attempts == 1:
                raise OperationalError("insert", {}, Exception("the connection is lost"))
            return result

        monkeypatch.setattr(store._writer, "_execute", lose_the_answer)
        assert await store.accept(row, encode_operation(row.operation), SESSION)
        assert attempts == 2
        assert not await store.accept(row, encode_operation(row.operation))
        assert [request.id for request in await store.pending_requests()] == ["r1"]
        assert store.all(Session) == [SESSION]
        await store.close()

    asyncio.run(main())


@pytest.mark.only_on("postgresql")
def test_values_that_postgresql_cannot_store_are_rejected(tmp_path: Path) -> None:
    async def main() -> None:
        store = await open_store(tmp_path, url_of(tmp_path))
        for bad in ({"display_name": "a\0b"}, {"metadata": {"a": float("nan")}}, {"project_id": "\0"}):
            with pytest.raises(BadRequest, match="cannot store"):
                await store.put(replace(SESSION, **bad))
        with pytest.raises(BadRequest):
            await store.result("a\0", "o")
        assert store.all(Session) == []
        held = replace(SESSION, metadata={"a": "b\0", "c": "\ud800"})
        await store.put(held)
        await store.close()
        store = await open_store(tmp_path, url_of(tmp_path))
        assert store.all(Session) == [held], "JSON columns store any text"
        await store.close()

    asyncio.run(main())


def test_cancellation_leaves_no_open_transaction(tmp_path: Path) -> None:
    async def main() -> None:
        store = await open_store(tmp_path, url_of(tmp_path))
        rows = [queued_request(f"r{seq}", "o", MODEL.id, seq, seq, WORKS[0]) for seq in range(20)]
        writing = [asyncio.create_task(store.accept(row, encode_operation(row.operation))) for row in rows]
        await asyncio.sleep(0.01)
        for task in writing:
            task.cancel()
        await asyncio.gather(*writing, return_exceptions=True)
        stored = {row.id for row in await store.pending_requests()}
        assert {row.id for row, task in zip(rows, writing, strict=True) if not task.cancelled()} <= stored
        await store.close()

    asyncio.run(main())


def test_reads_wait_while_the_disk_is_full(tmp_path: Path) -> None:
    """SQLite may need to write to its index before it can read. Fails with `connect` in place of `_read`."""

    async def main() -> None:
        store = await open_store(tmp_path)
        await store.put(SESSION, MODEL)
        row = queued_request("r1", "o", MODEL.id, 1, 1, WORKS[0])
        assert await store.accept(row, encode_operation(row.operation))
        failures: list[int] = []

        def fail(*_: object) -> None:
            if failures.pop():
                error = sqlite3.OperationalError("database or disk is full")
                error.sqlite_errorcode = sqlite3.SQLITE_FULL
                raise OperationalError("select", {}, error)

        event.listen(store.database.sync_engine, "before_cursor_execute", fail)
        for read in (
            store.pending_requests,
            store.highest_seqs,
            lambda: store.requests_to_replay(MODEL),
            lambda: store.last_used([MODEL]),
        ):
            failures[:] = [0] * 9 + [1]
            await read()
            assert len(failures) < 9, "read again"
        event.remove(store.database.sync_engine, "before_cursor_execute", fail)
        await store.close()

    asyncio.run(main())
