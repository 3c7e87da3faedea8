"""What follows from an answered request never undoes it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.service.inprocess import Api, Factory, api, loss_in, pass_body
from tinsmith.errors import EngineError
from tinsmith.service.storage.records import Model


async def loss(on: Api, model: str, seq: int) -> float:
    return loss_in(await on.result((await on.post("forward_backward", pass_body(model, seq))).json()))


def test_a_state_that_cannot_be_captured_takes_nothing_back(tmp_path: Path) -> None:
    async def main() -> None:
        start = Factory()

        def full(call: str, to: object) -> None:
            if call == "save" and "journal" in str(to):
                raise EngineError("No space left on device.")

        start.hook = full
        async with api(tmp_path, start, capture_every=1) as on:
            model = await on.model(seed=1)
            await loss(on, model, 1)
            stepped = await on.step(model, 2)
            trained = await loss(on, model, 3)
            assert "metrics" in stepped
        async with api(tmp_path, start, capture_every=1) as on:
            assert await loss(on, model, 4) == trained
            assert (await on.result({"request_id": f"{model}:2"})).json() == stepped
            start.hook = lambda call, argument: None
            await on.step(model, 5)
            await loss(on, model, 6)
            found = on.service.store.find(Model, model)
            assert found is not None
            assert found.covered == 5, "the next step has it captured"

    asyncio.run(main())
