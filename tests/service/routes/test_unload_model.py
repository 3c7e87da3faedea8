"""unload_model, called by SDKs before 0.26."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.service.support.inprocess import api


def test_unload_ends_a_model_after_queued_requests(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path) as app:
            model = await app.model()
            waiting = await app.post("optim_step", {"model_id": model, "seq_id": 1, "adam_params": {}})
            for _ in range(2):  # a client may repeat the request
                promise = await app.call("unload_model", {"model_id": model, "type": "unload_model"})
                assert promise == {"model_id": model, "type": "unload_model"}
            assert "metrics" in (await app.result(waiting.json())).json()
            refused = await app.post("optim_step", {"model_id": model, "seq_id": 2, "adam_params": {}})
            while refused.status_code == 200:  # it ends after the response
                await app.result(refused.json())
                refused = await app.post("optim_step", {"model_id": model, "seq_id": 3, "adam_params": {}})
            assert refused.status_code == 400
            assert "ended" in refused.json()["detail"]
            assert (await app.post("unload_model", {"model_id": f"{model}0"})).status_code == 404

    asyncio.run(main())
