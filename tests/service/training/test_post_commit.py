"""Work after a commit: a failure does not undo the request."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.service.support.inprocess import Api, Factory, api, loss_in, pass_body
from tinsmith.errors import EngineError
from tinsmith.service.storage.records import Model


async def loss(app: Api, model: str, seq: int) -> float:
    return loss_in(await app.result((await app.post("forward_backward", pass_body(model, seq))).json()))


def test_failed_capture_does_not_undo_the_request(tmp_path: Path) -> None:
    async def main() -> None:
        start = Factory()

        def full(call: str, to: object) -> None:
            if call == "save" and "journal" in str(to):
                raise EngineError("No space left on device.")

        start.hook = full
        async with api(tmp_path, start, capture_every=1) as app:
            model = await app.model(seed=1)
            await loss(app, model, 1)
            stepped = await app.step(model, 2)
            trained = await loss(app, model, 3)
            assert "metrics" in stepped
        async with api(tmp_path, start, capture_every=1) as app:
            assert await loss(app, model, 4) == trained
            assert (await app.result({"request_id": f"{model}:2"})).json() == stepped
            start.hook = lambda call, argument: None
            await app.step(model, 5)
            await loss(app, model, 6)
            record = app.service.store.find(Model, model)
            assert record is not None
            assert record.covered == 5, "the next step captures again"

    asyncio.run(main())
