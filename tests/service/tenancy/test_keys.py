"""Keys in the database: what is kept of them, and that two who write do not undo each other."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from tests.service.databases import beside, url_of
from tinsmith.errors import BadRequest, ConfigError, NotFound
from tinsmith.service.tenancy.keys import (
    Quotas,
    Tenants,
    create_key,
    open_key_database,
    read_keys,
    revoke_key,
    set_quotas,
)


def within(data: Path, work: Callable[[AsyncEngine], Awaitable[None]]) -> None:
    async def main() -> None:
        async with open_key_database(data, url_of(data)) as engine:
            await work(engine)

    asyncio.run(main())


def test_only_a_hash_is_kept(tmp_path: Path) -> None:
    made = []

    async def work(engine: AsyncEngine) -> None:
        made.extend(await create_key(engine, "ci", "alice", admin=True, lifetime_s=60))

    within(tmp_path, work)
    key, kept = made
    assert key.startswith("tml-")
    assert len(key) > 40
    with beside(tmp_path) as engine, engine.connect() as db:
        [row] = db.execute(text("select * from keys")).mappings()
    assert row["hash"] == hashlib.sha256(key.encode()).hexdigest()
    assert key not in str(dict(row))
    assert (kept.name, kept.owner, kept.admin, kept.id) == ("ci", "alice", True, row["id"])
    assert kept.expires == pytest.approx(time.time() + 60, abs=30)


def test_a_key_is_good_until_it_ends_or_is_revoked(tmp_path: Path) -> None:
    async def work(engine: AsyncEngine) -> None:
        tenants = Tenants(engine, "tml-own")
        good, _ = await create_key(engine, "good", "alice")
        over, _ = await create_key(engine, "over", "alice", lifetime_s=0)
        assert tenants.authenticate(good) is None, "not read yet"
        await tenants.reload()
        found = tenants.authenticate(good)
        assert found is not None
        assert (found.owner, found.admin) == ("alice", False)
        assert tenants.key_by_id(found.id) == found
        assert [tenants.authenticate(key) for key in (over, "", "tml-", good[:-1], good + "x")] == [None] * 5
        own = tenants.authenticate("tml-own")
        assert own is not None
        assert (own.owner, own.admin, tenants.key_by_id(own.id)) == ("local", True, own)
        assert tenants.has_keys
        await revoke_key(engine, "good")
        await tenants.reload()
        assert (tenants.authenticate(good), tenants.key_by_id(found.id), tenants.has_keys) == (None, None, False)
        assert Tenants(engine, None).authenticate("") is None
        assert Tenants(engine, None).key_by_id(0) is None

    within(tmp_path, work)


def test_a_name_means_one_good_key(tmp_path: Path) -> None:
    async def work(engine: AsyncEngine) -> None:
        made = await asyncio.gather(*(create_key(engine, "a", "alice") for _ in range(5)), return_exceptions=True)
        refused = [one for one in made if isinstance(one, ConfigError)]
        assert len(refused) == 4
        first = await revoke_key(engine, "a")
        assert await revoke_key(engine, "a") == first, "to revoke again changes nothing"
        _, second = await create_key(engine, "a", "alice")
        assert (await revoke_key(engine, "a")).id == second.id
        assert (await revoke_key(engine, str(first.id))).id == first.id
        with pytest.raises(NotFound):
            await revoke_key(engine, "b")
        for bad in ("", "a b", "a/b", "a" * 101, "a\0", "12"):
            with pytest.raises(ConfigError):
                await create_key(engine, bad, "alice")
            with pytest.raises(ConfigError):
                await create_key(engine, "b", bad)

    within(tmp_path, work)


def test_quotas_change_one_by_one(tmp_path: Path) -> None:
    async def work(engine: AsyncEngine) -> None:
        await set_quotas(engine, "alice", {"models": 3, "queued": 0})
        await set_quotas(engine, "bob", {"tokens_per_minute": 10**12})
        await set_quotas(engine, "alice", {"models": None, "checkpoint_bytes": 5})
        with pytest.raises(BadRequest):
            await set_quotas(engine, "alice", {"models": -1})
        _, quotas = await read_keys(engine)
        assert quotas == {"alice": Quotas(queued=0, checkpoint_bytes=5), "bob": Quotas(tokens_per_minute=10**12)}
        tenants = Tenants(engine, None)
        await tenants.reload()
        assert (tenants.quotas("alice"), tenants.quotas("carol")) == (quotas["alice"], Quotas())

    within(tmp_path, work)


def test_commands_do_not_upgrade_a_database_under_its_server(tmp_path: Path) -> None:
    within(tmp_path, lambda engine: asyncio.sleep(0))
    with beside(tmp_path) as engine, engine.begin() as db:
        db.execute(text("update alembic_version set version_num = '0001'"))
    with pytest.raises(ConfigError, match="brings the database up to date"):
        within(tmp_path, lambda engine: asyncio.sleep(0))
