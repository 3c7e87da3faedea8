"""API keys and quotas in the database."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from tests.service.support.databases import beside, url_of
from tinsmith.errors import BadRequest, ConfigError, NotFound
from tinsmith.service.storage import database
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


def test_database_stores_only_the_hash_of_a_key(tmp_path: Path) -> None:
    made = []

    async def work(engine: AsyncEngine) -> None:
        made.extend(await create_key(engine, "ci", "alice", admin=True, lifetime_s=60))

    within(tmp_path, work)
    key, record = made
    assert key.startswith("tml-")
    assert len(key) > 40
    with beside(tmp_path) as engine, engine.connect() as db:
        [row] = db.execute(text("select * from keys")).mappings()
    assert row["hash"] == hashlib.sha256(key.encode()).hexdigest()
    assert key not in str(dict(row))
    assert (record.name, record.owner, record.admin, record.id) == ("ci", "alice", True, row["id"])
    assert record.expires == pytest.approx(time.time() + 60, abs=30)


def test_key_is_valid_until_it_expires_or_is_revoked(tmp_path: Path) -> None:
    async def work(engine: AsyncEngine) -> None:
        tenants = Tenants(engine, "tml-own")
        good, _ = await create_key(engine, "good", "alice")
        over, _ = await create_key(engine, "over", "alice", lifetime_s=0)
        assert tenants.authenticate(good) is None, "keys are read by reload"
        await tenants.reload()
        record = tenants.authenticate(good)
        assert record is not None
        assert (record.owner, record.admin) == ("alice", False)
        assert tenants.key_by_id(record.id) == record
        assert [tenants.authenticate(key) for key in (over, "", "tml-", good[:-1], good + "x")] == [None] * 5
        own = tenants.authenticate("tml-own")
        assert own is not None
        assert (own.owner, own.admin, tenants.key_by_id(own.id)) == ("local", True, own)
        assert tenants.has_keys
        await revoke_key(engine, "good")
        await tenants.reload()
        assert (tenants.authenticate(good), tenants.key_by_id(record.id), tenants.has_keys) == (None, None, False)
        assert Tenants(engine, None).authenticate("") is None
        assert Tenants(engine, None).key_by_id(0) is None

    within(tmp_path, work)


def test_name_has_at_most_one_valid_key(tmp_path: Path) -> None:
    async def work(engine: AsyncEngine) -> None:
        made = await asyncio.gather(*(create_key(engine, "a", "alice") for _ in range(5)), return_exceptions=True)
        refused = [result for result in made if isinstance(result, ConfigError)]
        assert len(refused) == 4
        first = await revoke_key(engine, "a")
        assert await revoke_key(engine, "a") == first, "revoking is idempotent"
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


def test_quotas_are_set_individually(tmp_path: Path) -> None:
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


def test_key_commands_do_not_migrate_the_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    within(tmp_path, lambda engine: asyncio.sleep(0))
    monkeypatch.setattr(database, "head_revision", lambda: "9000")
    with pytest.raises(ConfigError, match=r"this tinsmith's is 9000.*Start this tinsmith's server"):
        within(tmp_path, lambda engine: asyncio.sleep(0))
