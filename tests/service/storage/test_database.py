"""Migrations, databases of older versions, and the lock of a database."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine, text

import tinsmith.service.storage.database as database_module
from tests.service.storage.test_store import CHECKPOINT, MODEL, SAMPLER, SESSION, WORKS
from tests.service.support.databases import beside, url_of
from tests.service.support.inprocess import until
from tinsmith.errors import ConfigError
from tinsmith.service.storage.database import MIGRATIONS, SQUASHED_REVISIONS, migrate, open_engine
from tinsmith.service.storage.payloads import encode_operation, queued_request
from tinsmith.service.storage.records import Checkpoint, CustomLoss, FutureResult, Model, SamplingSession, Session
from tinsmith.service.storage.store import FinishedRequest, exclusive_store, open_store
from tinsmith.service.storage.tables import META

REVISION_0005 = Path(__file__).parent / "revision_0005.sql"
"""Database dump of the last development version."""
BEFORE_MIGRATIONS = Path(__file__).parent / "before_migrations.sql"
"""Database dump from before migrations: a session, a model, a sampling session, a checkpoint, requests."""


def migrated(data: Path) -> None:
    async def main() -> None:
        engine = open_engine(data, url_of(data))
        await migrate(engine)
        await engine.dispose()

    asyncio.run(main())


def differences(data: Path) -> list:
    with beside(data) as engine, engine.connect() as db:
        return compare_metadata(MigrationContext.configure(db, opts={"compare_type": True}), META)


def test_migrations_create_the_declared_tables(tmp_path: Path) -> None:
    migrated(tmp_path)
    assert differences(tmp_path) == []
    migrated(tmp_path)
    assert differences(tmp_path) == []


def test_migrations_are_linear() -> None:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    numbers = [script.revision for script in ScriptDirectory.from_config(config).walk_revisions()]
    assert numbers == [f"{number:04d}" for number in range(4 + len(numbers), 4, -1)]


def test_concurrent_starts_migrate_once(tmp_path: Path) -> None:
    async def main() -> None:
        engines = [open_engine(tmp_path, url_of(tmp_path)) for _ in range(4)]
        await asyncio.gather(*(migrate(engine) for engine in engines))
        for engine in engines:
            await engine.dispose()

    asyncio.run(main())
    assert differences(tmp_path) == []


def test_newer_and_foreign_databases_are_rejected(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    migrated(tmp_path)
    with beside(tmp_path) as engine, engine.begin() as db:
        db.execute(text("update alembic_version set version_num = '9999'"))
    with pytest.raises(ConfigError, match=r"another version.*9999"):
        asyncio.run(open_store(tmp_path, url_of(tmp_path)))
    with beside(other) as engine, engine.begin() as db:
        db.execute(text("create table sessions (mine text)"))
    with pytest.raises(ConfigError, match="something else"):
        asyncio.run(open_store(other, url_of(other)))
    with beside(other) as engine, engine.begin() as db:
        assert db.execute(text("select * from sessions")).keys() == {"mine"}, "the database is unchanged"


@pytest.mark.only_on("postgresql")
def test_second_server_is_refused_while_the_first_runs(tmp_path: Path) -> None:

    async def main() -> None:
        url = url_of(tmp_path)
        async with exclusive_store(tmp_path, url):
            with pytest.raises(ConfigError, match="Another server uses"):
                async with exclusive_store(tmp_path, url):
                    pass
        async with exclusive_store(tmp_path, url):
            pass

    asyncio.run(main())


@pytest.mark.only_on("postgresql")
def test_lock_is_acquired_again_after_a_database_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If another server acquired it first, this server exits."""
    monkeypatch.setattr(database_module, "_PING_S", 0.1)
    ended = []
    monkeypatch.setattr(os, "kill", lambda pid, number: ended.append((pid, number)))
    url = url_of(tmp_path)

    def cut() -> None:
        with beside(tmp_path) as engine, engine.connect() as db:
            others = "datname = current_database() and pid <> pg_backend_pid()"
            db.execute(text(f"select pg_terminate_backend(pid) from pg_stat_activity where {others}"))

    acquire, acquired = database_module._ServerLock.acquire, []

    async def counted(lock: database_module._ServerLock) -> None:
        await acquire(lock)
        acquired.append(lock)

    monkeypatch.setattr(database_module._ServerLock, "acquire", counted)

    async def main() -> None:
        async with exclusive_store(tmp_path, url):
            await asyncio.to_thread(cut)
            await until(lambda: len(acquired) == 2)
            with pytest.raises(ConfigError, match="Another server uses"):
                async with exclusive_store(tmp_path, url):
                    pass
            assert ended == []
            monkeypatch.setattr(
                database_module._ServerLock, "release", give_up(database_module._ServerLock.release, url)
            )
            await asyncio.to_thread(cut)
            await until(lambda: bool(ended))
            assert ended == [(os.getpid(), signal.SIGTERM)]

    asyncio.run(main())


def give_up(release, url):
    """Let another server take the lock when it is free."""
    taken = []

    async def released(self) -> None:
        await release(self)
        if not taken:
            taken.append(create_engine(url).connect())
            taken[0].execute(text(f"select pg_advisory_lock({database_module._SERVER_LOCK})"))
        else:
            taken[0].close()
            taken[0].engine.dispose()

    return released


def test_unreachable_database_error_hides_the_password(tmp_path: Path) -> None:
    async def main() -> None:
        async with exclusive_store(tmp_path, "postgresql+psycopg://me:secret@127.0.0.1:1/none"):
            pass

    with pytest.raises(ConfigError, match="does not answer") as error:
        asyncio.run(main())
    assert "secret" not in str(error.value)


@pytest.mark.only_on("sqlite")
def test_revision_0005_is_upgraded(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "tinsmith.db") as old:
        old.executescript(REVISION_0005.read_text())
    old.close()

    async def main() -> None:
        store = await open_store(tmp_path)
        assert store.all(Session) == [SESSION]
        assert store.all(Model) == [replace(MODEL, inflight="v", used=3.0)]
        assert store.all(SamplingSession) == [replace(SAMPLER, inflight_of=MODEL.id, joined=2)]
        assert store.all(Checkpoint) == [replace(CHECKPOINT, public=True)]
        assert [loss.id for loss in store.all(CustomLoss)] == ["s:loss:0"]
        assert await store.result(f"{MODEL.id}:1", "o") == ("done", FutureResult(body=b"x"))
        assert tuple(request.operation for request in await store.pending_requests()) == WORKS[1:]
        [replayed] = await store.requests_to_replay(MODEL)
        assert (replayed.kind, replayed.batch) == ("step", 7)
        await store.close()

    asyncio.run(main())
    assert differences(tmp_path) == []


@pytest.mark.only_on("sqlite")
@pytest.mark.parametrize("revision", SQUASHED_REVISIONS)
def test_squashed_revisions_get_missing_columns(tmp_path: Path, revision: str) -> None:
    with sqlite3.connect(tmp_path / "tinsmith.db") as old:
        old.executescript(BEFORE_MIGRATIONS.read_text())
        old.executescript("create table alembic_version (version_num varchar(32) not null primary key)")
        old.execute("insert into alembic_version values (?)", [revision])
        old.execute("pragma user_version = 0")
    old.close()
    migrated(tmp_path)
    assert differences(tmp_path) == []


@pytest.mark.only_on("sqlite")
def test_folder_from_before_migrations_is_upgraded(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "tinsmith.db") as old:
        old.executescript(BEFORE_MIGRATIONS.read_text())
    old.close()

    async def main() -> None:
        store = await open_store(tmp_path)
        assert store.all(Session) == [SESSION]
        assert store.all(Model) == [MODEL]
        assert (store.find(SamplingSession, SAMPLER.id), store.find(Checkpoint, "c")) == (SAMPLER, CHECKPOINT)
        assert tuple(row.operation for row in await store.pending_requests()) == WORKS[1:4]
        assert await store.result(f"{MODEL.id}:1", "o") == ("done", FutureResult(body=b"x"))
        extra = queued_request("new", "o", MODEL.id, 9, 9, WORKS[0])
        assert await store.accept(extra, encode_operation(extra.operation))
        await store.finish([FinishedRequest(request=extra, result=FutureResult(body=b"y"))])
        await store.close()

    asyncio.run(main())
    assert differences(tmp_path) == []


@pytest.mark.only_on("sqlite")
def test_migrations_remove_no_table_or_column(tmp_path: Path) -> None:
    """The first migration only adds and widens columns."""
    with sqlite3.connect(tmp_path / "old.db") as old:
        old.executescript(BEFORE_MIGRATIONS.read_text())
    old.close()
    engine = create_engine(f"sqlite:///{tmp_path / 'old.db'}")
    with engine.connect() as db:
        before = compare_metadata(MigrationContext.configure(db, opts={"compare_type": True}), META)
    engine.dispose()
    assert [change for change in before if "remove" in str(change[0])] == [], "tables or columns are removed"
