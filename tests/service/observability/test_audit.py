"""What is noted reaches the database once, whoever is interrupted on the way."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from sqlalchemy import func, select

from tinsmith.service.observability.audit import Chronicle
from tinsmith.service.storage.store import served_store
from tinsmith.service.storage.tables import AUDIT


def test_a_flush_that_is_cancelled_loses_nothing_doubles_nothing_and_locks_nothing(tmp_path: Path) -> None:
    """As when the server ends. A transaction left open would lock SQLite's file for whoever writes next."""

    async def main() -> None:
        async with served_store(tmp_path, None) as store:
            chronicle = Chronicle(store)
            await chronicle.load()
            for patience in range(60):
                chronicle.audit("me", "key_created", "me", number=patience)
                flush = asyncio.create_task(chronicle.flush())
                for _ in range(patience % 20):
                    await asyncio.sleep(0 if patience < 40 else 0.0003)
                flush.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await flush
            async with asyncio.timeout(5):
                await chronicle.flush()
            async with store.database.connect() as db:
                assert (await db.execute(select(func.count()).select_from(AUDIT))).scalar() == 60

    asyncio.run(main())
