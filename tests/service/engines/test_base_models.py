"""Base models that are loaded, unloaded and replaced while the server runs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.service.support.inprocess import Api, Factory, MortalEngine, api, loss_in, pass_body
from tinsmith.engine.config import EngineConfig
from tinsmith.errors import ConfigError, EngineError
from tinsmith.service.engines.host import RunningEngine

BOTH = ("toy=one", "other=two")


class FailingFactory(Factory):
    """Does not start engines of the source `broken`."""

    async def __call__(self, config: EngineConfig) -> RunningEngine:
        if config.source == "broken":
            raise ConfigError("The folder broken has no config.json.")
        return await super().__call__(config)


async def states(app: Api) -> dict[str, str]:
    listed = (await app.send("GET", "/api/v1/admin/base_models", b"")).json()["base_models"]
    return {status["name"]: status["state"] for status in listed}


async def until_states(app: Api, expected: dict[str, str]) -> None:
    for _ in range(6000):
        if await states(app) == expected:
            return
        await asyncio.sleep(0.01)
    assert await states(app) == expected


async def load(app: Api, name: str, **body: Any) -> int:
    return (await app.post("admin/base_models", {"name": name, **body})).status_code


async def unload(app: Api, name: str) -> int:
    return (await app.send("DELETE", f"/api/v1/admin/base_models/{name}", b"")).status_code


async def train(app: Api, model: str, steps: range) -> list[float]:
    losses = []
    for step in steps:
        promise = (await app.post("forward_backward", pass_body(model, 2 * step + 1))).json()
        losses.append(loss_in(await app.result(promise)))
        await app.step(model, 2 * step + 2)
    return losses


def test_model_is_loaded_while_the_server_runs(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path, models=("first",)) as app:
            assert await load(app, "toy", source="one") == 202
            await until_states(app, {"first": "up", "toy": "up"})
            assert len(await train(app, await app.model(), range(1))) == 1
            assert await load(app, "toy", source="one") == 400  # the name is taken
        async with api(tmp_path, models=("first",)) as app:  # the next server serves it too
            assert await states(app) == {"first": "up", "toy": "up"}
            assert await unload(app, "toy") == 202
            await until_states(app, {"first": "up"})
            assert await unload(app, "first") == 400  # the last one
            assert await unload(app, "toy") == 404
        async with api(tmp_path, models=("first",)) as app:
            assert await states(app) == {"first": "up"}

    asyncio.run(main())


def test_one_that_fails_leaves_the_others_serving(tmp_path: Path) -> None:
    """At the start and later. Without `BaseModels._leave_out`, the first start would end the server."""

    async def main() -> None:
        async with api(tmp_path, FailingFactory(), models=("toy=one", "bad=broken")) as app:
            assert await states(app) == {"toy": "up", "bad": "failed"}
            await app.model()
            assert await load(app, "worse", source="broken") == 202
            await until_states(app, {"toy": "up", "bad": "failed", "worse": "failed"})
            listed = (await app.send("GET", "/api/v1/admin/base_models", b"")).json()["base_models"]
            assert "has no config.json" in listed[-1]["error"]
            assert await load(app, "worse", source="two") == 202
            await until_states(app, {"toy": "up", "bad": "failed", "worse": "up"})

    asyncio.run(main())


def test_unloading_loses_nothing(tmp_path: Path) -> None:
    """Training goes on bit for bit. Without `BaseModels._take_over`, the request that waits would never run."""

    async def main() -> None:
        async with api(tmp_path / "calm", models=BOTH) as app:
            expected = await train(app, await app.model(seed=1), range(4))
        start = Factory()
        async with api(tmp_path / "changed", start, models=BOTH, hold_s=0.2) as app:
            model = await app.model(seed=1)
            losses = await train(app, model, range(2))
            going_on = asyncio.Event()
            start.hook = lambda call, _: going_on.wait() if call == "run" else None
            waiting = (await app.post("forward_backward", pass_body(model, 5))).json()
            await unload(app, "toy")
            start.hook = lambda call, _: None
            going_on.set()
            await until_states(app, {"other": "up"})
            refused = await app.post("forward_backward", pass_body(model, 6))
            assert (refused.status_code, "toy is not served here" in refused.text) == (404, True)
            await load(app, "toy", source="one")
            await until_states(app, {"other": "up", "toy": "up"})
            losses.append(loss_in(await app.result(waiting)))
            await app.step(model, 6)
            losses += await train(app, model, range(3, 4))
        assert losses == expected

    asyncio.run(main())


def test_model_is_replaced_by_another_source(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path, models=BOTH) as app:
            assert await load(app, "toy", source="three", replace=True) == 202
            for _ in range(6000):
                listed = (await app.send("GET", "/api/v1/admin/base_models", b"")).json()["base_models"]
                sources = {status["name"]: status["source"] for status in listed if status["state"] == "up"}
                if sources == {"toy": "three", "other": "two"}:
                    break
                await asyncio.sleep(0.01)
            assert sources == {"toy": "three", "other": "two"}
            await app.model()

    asyncio.run(main())


@pytest.mark.parametrize("path", ["admin/base_models"])
def test_tenants_may_not(tmp_path: Path, path: str) -> None:
    async def main() -> None:
        async with api(tmp_path) as app:
            tenant = await app.tenant("alice")
            assert (await tenant.post(path, {"name": "x"})).status_code == 403
            assert (await tenant.send("GET", f"/api/v1/{path}", b"")).status_code == 403
            assert (await tenant.send("DELETE", f"/api/v1/{path}/toy", b"")).status_code == 403

    asyncio.run(main())


def test_other_engines_release_memory_before_a_start(tmp_path: Path) -> None:
    """Also if one of them cannot. Break it: let `BaseModels.release_memory` do nothing."""

    async def main() -> None:
        factory = Factory()
        async with api(tmp_path, factory, models=BOTH) as app:
            first, second = (made.engine for made in factory.made)
            assert isinstance(first, MortalEngine)
            assert isinstance(second, MortalEngine)

            def fail(call: str, argument: object) -> None:
                if call == "release_memory" and second.calls.count(call) == 1:
                    raise EngineError("no")

            factory.hook = fail
            assert await load(app, "third", source="three") == 202
            await until_states(app, {"toy": "up", "other": "up", "third": "up"})
            assert [engine.calls.count("release_memory") for engine in (first, second)] == [1, 1]
            factory.made[0].died.set()  # a restart needs memory too
            await app.model()
            assert second.calls.count("release_memory") == 2

    asyncio.run(main())


def test_last_models_are_not_unloaded_during_a_load(tmp_path: Path) -> None:
    """The load may fail, and the server would serve nothing."""

    async def main() -> None:
        going_on = asyncio.Event()

        class SlowFactory(FailingFactory):
            async def __call__(self, config: EngineConfig) -> RunningEngine:
                if config.source == "broken":
                    await going_on.wait()
                return await super().__call__(config)

        async with api(tmp_path, SlowFactory(), models=BOTH) as app:
            assert await load(app, "third", source="broken") == 202
            assert await unload(app, "toy") == 202
            assert await unload(app, "toy") == 400  # it is being unloaded
            assert await unload(app, "other") == 400
            going_on.set()
            await until_states(app, {"other": "up", "third": "failed"})
            session = (await app.post("create_session", {"tags": []})).json()["session_id"]
            body = {"session_id": session, "model_seq_id": 0, "base_model": "other", "lora_config": {"rank": 4}}
            assert "model_id" in await app.call("create_model", body)

    asyncio.run(main())


def test_replaced_model_is_served_again_if_the_new_one_fails(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path, FailingFactory(), models=("toy=one",)) as app:
            assert await load(app, "toy", source="broken", replace=True) == 202
            await until_states(app, {"toy": "up"})
            [status] = (await app.send("GET", "/api/v1/admin/base_models", b"")).json()["base_models"]
            assert status["source"] == "one"
            assert "has no config.json" in status["error"]
            await app.model()

    asyncio.run(main())
