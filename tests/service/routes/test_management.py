"""The management API: lists of ten thousand checkpoints, paging, states of runs."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from tests.service.support.inprocess import Api, api, until
from tinsmith.engine.base import LoraSpec
from tinsmith.service.storage.records import Checkpoint, Model
from tinsmith.service.storage.retention import UNFETCHED_S, Retention, prune

MANY = 10_000
LIMIT_S = 0.3  # of CPU


async def filled(app: Api) -> str:
    """Make records of ten thousand checkpoints, without files. Returns the run."""
    run = await app.model()
    [model] = app.service.store.all(Model)
    first = Checkpoint(
        id="c0",
        owner=model.owner,
        run=run,
        kind="weights",
        name="0",
        base_model="toy",
        lora=LoraSpec(rank=4, seed=1),
        created=time.time(),
        made_by="r",
        size_bytes=1,
        metadata={"step": "1"},
    )
    made = [
        replace(first, id=f"c{n}", name=f"{n:05d}", created=first.created + n, expires=first.created + 99_999)
        for n in range(MANY)
    ]
    app.service.store._records.apply(
        {(Checkpoint, each.id): each for each in made}
    )  # writing each row to the database takes too long
    return run


async def fastest(call: Callable) -> tuple[float, object]:
    """Seconds of this process's CPU that a call takes at best, and its answer."""
    best, answer = float("inf"), None
    for _ in range(5):
        begun = time.process_time()
        answer = await call()
        best = min(best, time.process_time() - begun)
    return best, answer


def test_lists_ten_thousand_checkpoints(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path) as app:
            run = await filled(app)
            for path in (f"training_runs/{run}/checkpoints", f"checkpoints?limit={MANY}"):
                spent, answer = await fastest(lambda path=path: app.http.get(f"/api/v1/{path}"))
                listed = answer.json()["checkpoints"]
                assert [item["checkpoint_id"] for item in listed] == [f"weights/{n:05d}" for n in range(MANY)][::-1]
                assert all(datetime.fromisoformat(item["time"]).tzinfo for item in listed)
                plain, _ = await fastest(lambda listed=listed: asyncio.to_thread(json.dumps, listed))
                print(f"{path}: {spent * 1e3:.0f} ms, {spent / plain:.1f} times a plain dump")
                assert spent < max(LIMIT_S, 5 * plain)
            spent, answer = await fastest(lambda: app.http.get("/api/v1/checkpoints?limit=1000&offset=9500"))
            assert len(answer.json()["checkpoints"]) == 500
            assert answer.json()["cursor"] == {"offset": 9500, "limit": 1000, "total_count": MANY}

    asyncio.run(main())


def test_rejects_invalid_paging(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path) as app:
            for query in ("limit=-1", "offset=-1", "limit=x", "access_scope=all"):
                answer = await app.http.get(f"/api/v1/training_runs?{query}")
                assert answer.status_code == 400
                assert query.partition("=")[0] in answer.json()["detail"]
            empty = (await app.http.get("/api/v1/training_runs")).json()
            assert empty == {"training_runs": [], "cursor": {"offset": 0, "limit": 20, "total_count": 0}}

    asyncio.run(main())


def test_failed_run_is_corrupted_and_ended_run_is_listed(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path) as app:
            run = await app.model()
            await app.step(run, 1)
            [before] = (await app.http.get("/api/v1/training_runs")).json()["training_runs"]
            assert before["corrupted"] is False
            await app.post(f"sessions/{run.partition(':')[0]}/finish", {"reason": {"type": "success"}, "detail": None})
            await until(lambda: app.service.store.find(Model, run).state == "ended")
            await prune(app.service.store, Retention(fetched_s=1.0, ended_s=1.0), time.time() + 2 * UNFETCHED_S)
            [after] = (await app.http.get("/api/v1/training_runs")).json()["training_runs"]
            assert after == before
            await app.service.store.update(Model, run, state="failed")
            assert (await app.http.get(f"/api/v1/training_runs/{run}")).json()["corrupted"] is True

    asyncio.run(main())
