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


def test_fetched_training_results_leave_the_memory(tmp_path: Path) -> None:
    """They are read from the store after that. Break `mark_fetched`: leave out `_forget`."""

    async def main() -> None:
        async with api(tmp_path) as app:
            model = await app.model()
            promise = (await app.post("forward_backward", pass_body(model, 1))).json()
            first = await app.result(promise)
            assert not app.service.futures.knows(promise["request_id"], "local")
            again = await app.result(promise)
            assert (again.status_code, again.content) == (200, first.content)

    asyncio.run(main())
