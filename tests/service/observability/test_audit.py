"""AuditLog.flush under cancellation."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from sqlalchemy import func, select

from tinsmith.service.observability.audit import AuditLog
from tinsmith.service.storage.store import exclusive_store
from tinsmith.service.storage.tables import AUDIT


def test_cancelled_flush_neither_loses_nor_repeats_entries(tmp_path: Path) -> None:
    """A shutdown cancels the flush; a transaction left open would lock the SQLite file."""

    async def main() -> None:
        async with exclusive_store(tmp_path, None) as store:
            audit_log = AuditLog(store)
            await audit_log.load()
            for patience in range(60):
                audit_log.record("me", "key_created", "me", number=patience)
                flush = asyncio.create_task(audit_log.flush())
                for _ in range(patience % 20):
                    await asyncio.sleep(0 if patience < 40 else 0.0003)
                flush.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await flush
            async with asyncio.timeout(5):
                await audit_log.flush()
            async with store.database.connect() as db:
                assert (await db.execute(select(func.count()).select_from(AUDIT))).scalar() == 60

    asyncio.run(main())
