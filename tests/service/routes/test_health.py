"""Health routes: liveness, readiness by base model, and healthz."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.service.support.inprocess import Api, Factory, api, until
from tinsmith.engine.config import EngineConfig
from tinsmith.service.engines.host import RunningEngine


class Slow(Factory):
    """An engine of the source `toy` starts only after `gate` is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, config: EngineConfig) -> RunningEngine:
        if config.source == "toy":
            await self.gate.wait()
        return await super().__call__(config)


async def statuses(app: Api) -> list[int]:
    paths = ("/livez", "/readyz", "/readyz?model=toy", "/readyz?model=other", "/api/v1/healthz")
    del app.http.headers["X-API-Key"]
    answers = [(await app.http.get(path)).status_code for path in paths]
    app.http.headers["X-API-Key"] = "tml-test"
    return answers


def test_one_dead_engine_leaves_the_others_ready(tmp_path: Path) -> None:
    """Fails if healthz or `readyz?model=` looks at every engine."""

    async def main() -> None:
        start = Slow()
        async with api(tmp_path, start, models=("toy", "other")) as app:
            assert await statuses(app) == [200] * 5
            start.gate.clear()
            host = app.service.workers["toy"].host
            host.died.set()
            assert await statuses(app) == [200, 503, 503, 200, 200]
            body = (await app.http.get("/readyz")).json()
            assert body["models"]["toy"]["state"] == "restarting"
            assert body["models"]["other"]["state"] == "up"
            assert (body["database"], body["disk"]) == ("available", "ok")
            assert (await app.http.get("/api/v1/healthz")).json() == {"status": "ok", "waiting_for": ["toy"]}
            start.gate.set()
            await until(lambda: host.state == "up")
            assert await statuses(app) == [200] * 5
            assert (await app.http.get("/readyz?model=nobody")).status_code == 404

    asyncio.run(main())


def test_healthz_is_503_when_nothing_can_be_served(tmp_path: Path) -> None:
    async def main() -> None:
        start = Slow()
        async with api(tmp_path, start) as app:
            start.gate.clear()
            app.service.workers["toy"].host.died.set()
            answer = await app.http.get("/api/v1/healthz")
            assert (answer.status_code, answer.json()) == (503, {"status": "restarting", "waiting_for": ["toy"]})

    asyncio.run(main())


def test_draining_server_is_alive_but_not_ready(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path) as app:
            await app.service.drain.run(1.0)
            ready = await app.http.get("/readyz")
            assert (ready.status_code, ready.json()["status"]) == (503, "draining")
            assert (await app.http.get("/livez")).status_code == 200

    asyncio.run(main())


def test_low_disk_is_reported_and_stays_ready(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path, disk_reserve=1 << 60) as app:
            ready = await app.http.get("/readyz")
            assert (ready.status_code, ready.json()["disk"]) == (200, "low")

    asyncio.run(main())
