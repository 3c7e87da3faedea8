"""The time at which a training result was fetched."""

from __future__ import annotations

import asyncio
from pathlib import Path

from sqlalchemy import select

from tests.service.support.inprocess import api, pass_body, until
from tinsmith.service.storage.tables import REQUESTS


def test_fetch_of_a_training_result_is_recorded(tmp_path: Path) -> None:
    """Its retention starts then. Break `mark_fetched`: leave out the call of `on_fetched`."""

    async def main() -> None:
        async with api(tmp_path) as app:
            model = await app.model()
            fetched = (await app.post("forward_backward", pass_body(model, 1))).json()
            await app.result(fetched)
            await app.post("forward_backward", pass_body(model, 2))
            await until(lambda: app.service.futures.pending("local") == 0)
        async with api(tmp_path) as app, app.service.store.database.connect() as db:
            times = (await db.execute(select(REQUESTS.c.fetched).order_by(REQUESTS.c.seq))).scalars().all()
            assert [at is not None for at in times] == [True, True, False]

    asyncio.run(main())
