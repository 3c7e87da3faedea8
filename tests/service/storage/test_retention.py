"""What a store removes with time, and its indexes against a walk over all records."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import event, func, select

from tests.service.storage.test_store import CHECKPOINT, MODEL, SAMPLER, SESSION, WORKS
from tests.service.support.databases import opened
from tinsmith.service.storage.compaction import PAGES, SPARE_PAGES, give_back_pages
from tinsmith.service.storage.database import open_engine, sync_engine_of
from tinsmith.service.storage.payloads import encode_operation, queued_request
from tinsmith.service.storage.records import Checkpoint, FutureResult, Model, QueuedRequest, SamplingSession, Session
from tinsmith.service.storage.retention import UNFETCHED_S, Retention, prune, remove_ended
from tinsmith.service.storage.store import FinishedRequest, Store
from tinsmith.service.storage.tables import REQUESTS

HOUR = 3600.0
RETENTION = Retention(fetched_s=HOUR, ended_s=100 * HOUR)
DONE = FutureResult(body=b"x")


async def finished(store: Store, model: Model, *seqs: int) -> list[QueuedRequest]:
    """Accept requests of a model and finish them."""
    requests = [queued_request(f"{model.id}:{seq}", "o", model.id, seq, seq, WORKS[0]) for seq in seqs]
    await asyncio.gather(*(store.accept(each, encode_operation(WORKS[0])) for each in requests))
    await store.finish([FinishedRequest(request=each, result=DONE) for each in requests])
    return requests


async def ended_at(store: Store) -> float:
    """When the first request ended; 0 if there is none."""
    async with store.database.connect() as db:
        return (await db.execute(select(func.min(REQUESTS.c.done)))).scalar_one() or 0.0


def test_results_are_kept_from_their_fetch(tmp_path: Path) -> None:
    """A client that sleeps for hours loses nothing. Break `_is_old`: leave out the time of the fetch."""

    async def main() -> None:
        async with opened(tmp_path) as store:
            await store.put(MODEL)
            fetched, unfetched = await finished(store, MODEL, 1, 2)
            end = await ended_at(store)
            store.mark_fetched(fetched.id)
            await prune(store, RETENTION, end + 0.9 * HOUR)
            assert await store.result(fetched.id, "o") == ("done", DONE)
            await prune(store, RETENTION, end + 1.1 * HOUR)
            assert await store.result(fetched.id, "o") == ("done", None)
            await prune(store, RETENTION, end + 0.9 * UNFETCHED_S)
            assert await store.result(unfetched.id, "o") == ("done", DONE)
            await prune(store, RETENTION, end + 1.1 * UNFETCHED_S)
            assert await store.result(unfetched.id, "o") == ("done", None)
            long = Retention(fetched_s=3 * UNFETCHED_S, ended_s=1.0)
            [other] = await finished(store, MODEL, 3)
            await prune(store, long, end + 2 * UNFETCHED_S)
            assert await store.result(other.id, "o") == ("done", DONE)

    asyncio.run(main())


def test_rows_that_no_replay_needs_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A living model keeps its highest seq_ids and what its captured state does not cover; an ended model nothing."""
    monkeypatch.setattr("tinsmith.service.storage.retention.PIECE", 3)

    async def main() -> None:
        async with opened(tmp_path) as store:
            ended, gone = replace(MODEL, id="ended", state="ended"), replace(MODEL, id="gone")
            await store.put(MODEL, ended)
            await finished(store, MODEL, *range(1, 11))
            await finished(store, ended, *range(1, 11))
            await finished(store, gone, 1)
            await store.accept(queued_request("p", "o", MODEL.id, 11, 11, WORKS[0]), encode_operation(WORKS[0]))
            await store.cover(replace(MODEL, covered=7))
            await prune(store, RETENTION, await ended_at(store) + 1.1 * UNFETCHED_S)
            assert await store.highest_seqs() == {MODEL.id: (11, 10)}
            [model] = [each for each in store.all(Model) if each.id == MODEL.id]
            assert [each.seq for each in await store.requests_to_replay(model)] == [8, 9, 10]
            async with store.database.connect() as db:
                assert sorted((await db.execute(select(REQUESTS.c.seq))).scalars()) == [7, 8, 9, 10, 11]
            assert store.row_counts["requests"] == 5

    asyncio.run(main())


def test_records_of_ended_sessions_are_removed(tmp_path: Path) -> None:
    """Not the model of a named checkpoint, with its session, and nothing of a session that lives or ended lately."""

    async def main() -> None:
        async with opened(tmp_path) as store:
            for name, ended, seen in (("old", "success", 0.0), ("kept", "silence", 0.0), ("late", "success", 9e9)):
                await store.put(
                    replace(SESSION, id=name, ended=ended, seen=seen),
                    replace(MODEL, id=f"{name}:train:0", session_id=name, state="ended"),
                    replace(MODEL, id=f"{name}:train:1", session_id=name, state="ended"),
                    replace(SAMPLER, id=f"{name}:sample:0", session_id=name),
                )
            await store.put(SESSION, replace(MODEL, session_id="s"), SAMPLER)
            await store.put(replace(CHECKPOINT, run="kept:train:1"))
            removed = await remove_ended(store, RETENTION, 101 * HOUR)
            assert [each.id for each in removed] == ["old"]
            await store.put(replace(MODEL, id="kept:train:2", session_id="kept", state="live"))
            assert await remove_ended(store, RETENTION, 101 * HOUR) == []
        async with opened(tmp_path) as store:
            assert {each.id for each in store.all(Session)} == {"s", "kept", "late"}
            assert {each.id for each in store.all(Model)} == {
                *(MODEL.id, "kept:train:1", "kept:train:2", "late:train:0", "late:train:1")
            }
            assert {each.id for each in store.all(SamplingSession)} == {SAMPLER.id, "late:sample:0"}

    asyncio.run(main())


def test_indexes_equal_a_walk_over_all_records(tmp_path: Path) -> None:
    """Users of versions and bytes of checkpoints, after random changes and after a restart."""
    draw = random.Random(1)

    def check(store: Store) -> None:
        users = [*store.all(SamplingSession), *store.all(Model)]
        for version in "abc":
            expected = {
                each.id
                for each in users
                if version == (each.version if isinstance(each, SamplingSession) else each.inflight)
            }
            assert {each.id for each in store.users_of(version)} == expected
        for owner in "xy":
            sizes = [each.size_bytes for each in store.all(Checkpoint) if each.owner == owner]
            assert store.checkpoint_bytes(owner) == sum(sizes)

    async def main() -> None:
        async with opened(tmp_path) as store:
            for _ in range(60):
                number, version = draw.randrange(4), draw.choice([None, "a", "b", "c"])
                records = (
                    replace(SAMPLER, id=f"s:sample:{number}", version=version),
                    replace(MODEL, id=f"s:train:{number}", inflight=version),
                    replace(CHECKPOINT, id=f"{number}", size_bytes=draw.randrange(100), owner=draw.choice("xy")),
                )
                record = draw.choice(records)
                await (store.remove(record) if draw.random() < 0.3 else store.put(record))
                check(store)
            assert store.users_of("a")
        async with opened(tmp_path) as store:
            check(store)

    asyncio.run(main())


@pytest.mark.only_on("sqlite")
def test_sqlite_file_shrinks(tmp_path: Path) -> None:
    """Break `give_back_pages`: return 0."""

    async def main() -> None:
        async with opened(tmp_path) as store:
            sessions = [replace(SESSION, id=str(number), metadata={"a": "b" * 500_000}) for number in range(40)]
            await store.put(*sessions)
            await store.remove(*sessions)
            await store.compact()
            assert store.database_bytes() < 4096 * (SPARE_PAGES + 200)

    asyncio.run(main())


@pytest.mark.only_on("sqlite")
@pytest.mark.parametrize("kind", ["INCREMENTAL", "NONE"])
def test_pages_are_given_back_in_few_transactions(tmp_path: Path, kind: str) -> None:
    """Break it: give pages back by `execute`, which gives back one. NONE: a file that another program has made."""
    file = tmp_path / "tinsmith.db"
    with sqlite3.connect(file) as db:
        db.execute(f"PRAGMA auto_vacuum={kind}")
        db.execute("CREATE TABLE filler (content)")
        db.executemany("INSERT INTO filler VALUES (zeroblob(4000))", [()] * (SPARE_PAGES + PAGES + 500))
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("DELETE FROM filler")
    db.commit()
    free = db.execute("PRAGMA freelist_count").fetchone()[0]
    db.close()
    engine, statements = sync_engine_of(open_engine(tmp_path, None)), []
    event.listen(engine, "connect", lambda driver, _: driver.set_trace_callback(statements.append))
    given_back = give_back_pages(engine)
    engine.dispose()
    with sqlite3.connect(file) as db:
        assert db.execute("PRAGMA freelist_count").fetchone()[0] == free - given_back
    db.close()
    assert given_back == (free - SPARE_PAGES if kind == "INCREMENTAL" else 0)
    assert sum("incremental_vacuum" in statement for statement in statements) <= 2
