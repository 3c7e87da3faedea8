"""AuditLog.flush under cancellation, and the deletion of old entries."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest
from sqlalchemy import func, select

from tinsmith.engine.base import LoraSpec
from tinsmith.service.observability.audit import AuditLog
from tinsmith.service.storage.records import Checkpoint
from tinsmith.service.storage.store import Store, exclusive_store
from tinsmith.service.storage.tables import AUDIT, STORED, USAGE


def test_cancelled_flush_neither_loses_nor_repeats_entries(tmp_path: Path) -> None:
    """A shutdown cancels the flush; a transaction left open would lock the SQLite file."""

    async def main() -> None:
        async with exclusive_store(tmp_path, None) as store:
            audit_log = AuditLog(store, 1e9)
            await audit_log.load()
            for patience in range(60):
                audit_log.record("me", "key_created", "me", number=patience)
                flush = asyncio.create_task(audit_log.flush())
                for _ in range(patience % 20):
                    await asyncio.sleep(0 if patience < 40 else 0.0003)
                flush.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await flush
            async with asyncio.timeout(120):
                await audit_log.flush()
            async with store.database.connect() as db:
                assert (await db.execute(select(func.count()).select_from(AUDIT))).scalar() == 60

    asyncio.run(main())


def test_old_entries_are_deleted(tmp_path: Path) -> None:
    """Usage stays as long as a query may ask for it, timings for a week."""
    day, now = 86_400.0, time.time()

    def rows(age: float) -> None:
        at = now - age * day
        audit = {"owner": "me", "at": at, "event": "key_created", "details": {}}
        usage = {"owner": "me", "hour": int(at // 3600), "kind": "training", "base_model": "toy", "session_id": "s"}
        stored = {"owner": "me", "session_id": "s", "base_model": "toy", "size_bytes": 1, "begun": at, "id": f"{age}"}
        everything.append((audit, {**usage, "quantity": age}, {**stored, "ended": at}))

    everything: list[tuple[dict, dict, dict]] = []
    for age in (1, 13, 15, 40):
        rows(age)
    everything.append(
        (
            everything[0][0],
            {**everything[0][1], "kind": "x", "quantity": 0},
            {**everything[3][2], "id": "kept", "ended": None},
        )
    )

    async def main(retention_s: float) -> list[list[float]]:
        async with exclusive_store(tmp_path / f"{retention_s}", None) as store:
            for table, column in ((AUDIT, 0), (USAGE, 1), (STORED, 2)):
                await store.write(
                    lambda db, table=table, column=column: db.execute(
                        table.insert(), [each[column] for each in everything]
                    )
                )
            await store.write(AuditLog(store, retention_s)._delete_old)
            async with store.database.connect() as db:
                audits = [round((now - at) / day) for at in (await db.execute(select(AUDIT.c.at))).scalars()]
                usage = list((await db.execute(select(USAGE.c.quantity))).scalars())
                stored = list((await db.execute(select(STORED.c.id))).scalars())
        return [sorted(set(audits)), sorted(usage), sorted(stored)]

    for days in (5, 30):
        (tmp_path / f"{days * day}").mkdir()
    assert asyncio.run(main(5 * day)) == [[1], [0, 1, 13], ["1", "13", "kept"]]
    assert asyncio.run(main(30 * day)) == [[1, 13, 15], [0, 1, 13, 15], ["1", "13", "15", "kept"]]


def test_stored_checkpoints_follow_the_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that changed is looked at, not all; a failed write, and a removal before a restart, are made up for."""

    def checkpoint(key: str) -> Checkpoint:
        return Checkpoint(
            id=key, owner="me", kind="weights", run="run", name=key, base_model="toy", lora=LoraSpec(rank=1, seed=1),
            created=1.0, made_by="request",
        )  # fmt: skip

    async def rows(store: Store) -> dict[str, bool]:
        async with store.database.connect() as db:
            return {row.id: row.ended is None for row in (await db.execute(select(STORED))).all()}

    async def main() -> None:
        async with exclusive_store(tmp_path, None) as store:
            audit_log = AuditLog(store, 1e9)
            await audit_log.load()
            await store.put(checkpoint("a"), checkpoint("b"), checkpoint("c"))
            with monkeypatch.context() as patch:
                patch.setattr(store, "write", AsyncMock(side_effect=OSError("full")))
                with pytest.raises(OSError, match="full"):
                    await audit_log.flush()
            await audit_log.flush()
            assert await rows(store) == {"a": True, "b": True, "c": True}
            await store.remove(checkpoint("a"))
            with monkeypatch.context() as patch:
                patch.setattr(store, "all", Mock(side_effect=AssertionError("all records are read")))
                await audit_log.flush()
            assert await rows(store) == {"a": False, "b": True, "c": True}
            await store.remove(checkpoint("b"))
        async with exclusive_store(tmp_path, None) as store:
            audit_log = AuditLog(store, 1e9)
            await audit_log.load()
            await audit_log.flush()
            assert await rows(store) == {"a": False, "b": False, "c": True}

    asyncio.run(main())
