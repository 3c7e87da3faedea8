"""Migrations, databases of other versions, and the lock of a database."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine, text

import tinsmith.service.storage.database as database_module
from tests.service.support.databases import beside, url_of
from tests.service.support.inprocess import until
from tinsmith.errors import ConfigError
from tinsmith.service.storage.database import MIGRATIONS, head_revision, migrate, open_engine
from tinsmith.service.storage.store import exclusive_store
from tinsmith.service.storage.tables import META


def migrated(data: Path, *, upgrade: bool = True) -> None:
    async def main() -> None:
        engine = open_engine(data, url_of(data))
        try:
            await migrate(engine, upgrade=upgrade)
        finally:
            await engine.dispose()

    asyncio.run(main())


def differences(data: Path) -> list:
    with beside(data) as engine, engine.connect() as db:
        options = {"compare_type": True, "compare_server_default": True}
        return compare_metadata(MigrationContext.configure(db, opts=options), META)


def test_migrations_create_the_declared_tables(tmp_path: Path) -> None:
    migrated(tmp_path)
    assert differences(tmp_path) == []
    migrated(tmp_path)
    assert differences(tmp_path) == []


def test_migrations_are_linear() -> None:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    numbers = [script.revision for script in ScriptDirectory.from_config(config).walk_revisions()]
    assert numbers == [f"{number:04d}" for number in range(6 + len(numbers), 6, -1)]


def test_next_migration_upgrades_at_a_start_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    migrated(tmp_path)
    shutil.copytree(MIGRATIONS, tmp_path / "migrations", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "migrations" / "versions" / "v9000_next.py").write_text(
        "import sqlalchemy as sa\nfrom alembic import op\n"
        f"revision, down_revision = '9000', '{head_revision()}'\n"
        "def upgrade(): op.add_column('sessions', sa.Column('added', sa.String))\n"
    )
    with monkeypatch.context() as patch:
        patch.setattr(database_module, "MIGRATIONS", tmp_path / "migrations")
        with pytest.raises(ConfigError, match="this tinsmith's is 9000"):
            migrated(tmp_path, upgrade=False)
        assert differences(tmp_path) == []
        migrated(tmp_path)
        migrated(tmp_path, upgrade=False)
    assert [(change[0], change[3].name) for change in differences(tmp_path)] == [("remove_column", "added")]
    with pytest.raises(ConfigError, match="is of version 9000; this tinsmith knows"):
        migrated(tmp_path)


def test_concurrent_starts_migrate_once(tmp_path: Path) -> None:
    async def main() -> None:
        engines = [open_engine(tmp_path, url_of(tmp_path)) for _ in range(4)]
        await asyncio.gather(*(migrate(engine) for engine in engines))
        for engine in engines:
            await engine.dispose()

    asyncio.run(main())
    assert differences(tmp_path) == []


@pytest.mark.parametrize("revision", ["0001", "0006", "9999", "0123abcd"])
def test_database_of_an_unknown_version_is_refused(tmp_path: Path, revision: str) -> None:
    """Of a development version, of a newer one, and of another program."""
    migrated(tmp_path)
    with beside(tmp_path) as engine, engine.begin() as db:
        db.execute(text("update alembic_version set version_num = :revision"), {"revision": revision})
    for upgrade in (True, False):
        with pytest.raises(ConfigError, match=f"is of version {revision}; this tinsmith knows .*{head_revision()}"):
            migrated(tmp_path, upgrade=upgrade)


@pytest.mark.parametrize("has_empty_version", [False, True])
def test_tables_without_a_version_are_refused(tmp_path: Path, has_empty_version: bool) -> None:
    """Of another program, or of a development version from before migrations."""
    with beside(tmp_path) as engine, engine.begin() as db:
        db.execute(text("create table sessions (mine text)"))
        if has_empty_version:
            db.execute(text("create table alembic_version (version_num text)"))
    with pytest.raises(ConfigError, match="holds tables without a version: sessions"):
        migrated(tmp_path)
    with beside(tmp_path) as engine, engine.begin() as db:
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
