"""GET /v1/models lists the names that can be sampled from."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.service.support.inprocess import Api, api


async def listed(app: Api) -> list[str]:
    answer = await app.http.get("/v1/models")
    assert answer.status_code == 200, answer.text
    return [datum["id"] for datum in answer.json()["data"]]


def test_models_without_sampleable_weights_are_not_listed(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path) as app:
            model, elsewhere = await app.model(), await app.model()
            await app.call("save_weights_external", {"model_id": elsewhere, "path": "x", "seq_id": 1})
            assert await listed(app) == ["toy"]
            await app.call("save_weights", {"model_id": model, "path": "x", "seq_id": 1})
            assert await listed(app) == ["toy", model]
        async with api(tmp_path, models=("other",)) as app:
            assert await listed(app) == ["other"]

    asyncio.run(main())
