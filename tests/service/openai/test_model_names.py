"""GET /v1/models lists the names that can be sampled from."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.service.inprocess import Api, api


async def listed(on: Api) -> list[str]:
    answer = await on.http.get("/v1/models")
    assert answer.status_code == 200, answer.text
    return [datum["id"] for datum in answer.json()["data"]]


def test_models_without_sampleable_weights_are_not_listed(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path) as on:
            model, elsewhere = await on.model(), await on.model()
            await on.call("save_weights_external", {"model_id": elsewhere, "path": "x", "seq_id": 1})
            assert await listed(on) == ["toy"]
            await on.call("save_weights", {"model_id": model, "path": "x", "seq_id": 1})
            assert await listed(on) == ["toy", model]
        async with api(tmp_path, models=("other",)) as on:
            assert await listed(on) == ["other"]

    asyncio.run(main())
