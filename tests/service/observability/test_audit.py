"""AuditLog.flush under cancellation, and the deletion of old entries."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

from sqlalchemy import func, select

from tinsmith.service.observability.audit import AuditLog
from tinsmith.service.storage.store import exclusive_store
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
