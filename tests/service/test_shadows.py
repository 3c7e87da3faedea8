"""Shadows: forks in memory that change nothing of what they were made of, and that end by themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.service.support.inprocess import Api, Factory, api, loss_in, pass_body, until
from tinsmith.service.shadows import shadow_ttl
from tinsmith.service.storage.records import Model

SHADOW = {"role": "shadow", "ttl": "600"}


def run(main: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(main())  # type: ignore[arg-type]


async def session(app: Api) -> str:
    return (await app.post("create_session", {"tags": []})).json()["session_id"]


async def trained(app: Api) -> str:
    model = await app.model(seed=1)
    await app.result((await app.post("forward_backward", pass_body(model, 1))).json())
    await app.step(model, 2)
    return model


async def fork(app: Api, path: str, number: int = 0, **more: Any) -> dict:
    body = {"session_id": await session(app), "model_seq_id": number, "path": path, "user_metadata": SHADOW, **more}
    return await app.call("load_weights", body)


async def loss(app: Api, model: str, seq: int, *, forward: bool = False) -> float:
    body = pass_body(model, seq, **({"forward_only": True} if forward else {}))
    return loss_in(await app.result((await app.post("forward_backward", body)).json()))


def weights(start: Factory, model: str) -> list[np.ndarray]:
    held = start.made[-1].engine._models[model]  # type: ignore[attr-defined]
    arrays = [held.weights.a, held.weights.b, *held.grad, *held.moments, np.asarray(held.steps)]
    return [array.copy() for array in arrays]


def same(left: list[np.ndarray], right: list[np.ndarray]) -> bool:
    return all(np.array_equal(*pair) for pair in zip(left, right, strict=True))


@pytest.mark.parametrize("kind", ["live", "state", "sampler"])
def test_shadow_starts_at_its_source_and_leaves_it_alone(tmp_path: Path, kind: str) -> None:
    async def main() -> None:
        start = Factory()
        async with api(tmp_path, start) as app:
            model = await trained(app)
            path = f"tinker://{model}/weights/@live"
            if kind != "live":
                save = "save_weights" if kind == "state" else "save_weights_for_sampler"
                path = (await app.call(save, {"model_id": model, "seq_id": 3, "path": "v"}))["path"]
            await app.result((await app.post("forward_backward", pass_body(model, 4, (9, 8, 7)))).json())
            before = weights(start, model)
            here = await loss(app, model, 5, forward=True)
            for number in range(3):
                shadow = (await fork(app, path, number))["model_id"]
                assert await loss(app, shadow, 1) == here
                await app.step(shadow, 2, 0.5)
                assert await loss(app, shadow, 3, forward=True) < here
            assert same(before, weights(start, model))
            pending = await loss(app, model, 6)
            assert pending == here
            await app.step(model, 7)
            assert not same(before, weights(start, model))

    run(main)


def test_live_fork_has_the_weights_of_when_it_was_accepted(tmp_path: Path) -> None:
    async def main() -> None:
        start, go = Factory(), asyncio.Event()
        async with api(tmp_path, start) as app:
            model = await trained(app)
            after_one = await loss(app, model, 3, forward=True)
            held: list[str] = []

            async def hold(call: str, argument: object) -> None:
                held.append(call)
                await go.wait()

            start.hook = hold
            await app.post("forward_backward", pass_body(model, 4))
            await app.post("optim_step", {"model_id": model, "seq_id": 5, "adam_params": {"learning_rate": 0.1}})
            await until(lambda: held == ["run"])
            body = {"session_id": await session(app), "model_seq_id": 0, "path": f"tinker://{model}/weights/@live"}
            promise = (await app.post("load_weights", body | {"user_metadata": SHADOW})).json()
            await app.post("forward_backward", pass_body(model, 6))
            await app.post("optim_step", {"model_id": model, "seq_id": 7, "adam_params": {"learning_rate": 0.1}})
            start.hook = lambda call, argument: None
            go.set()
            shadow = (await app.result(promise)).json()["model_id"]
            after_two = await loss(app, shadow, 1, forward=True)
            after_three = await loss(app, model, 8, forward=True)
            assert after_three < after_two < after_one

    run(main)


def test_shadow_is_neither_listed_nor_stored_nor_saved(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path) as app:
            model = await trained(app)
            shadow = (await fork(app, f"tinker://{model}/weights/@live"))["model_id"]
            await loss(app, shadow, 1)
            listed = (await app.send("GET", "/api/v1/training_runs", b"")).json()["training_runs"]
            assert [run["training_run_id"] for run in listed] == [model]
            assert [record.id for record in app.service.store.all(Model)] == [model]
            assert await app.service.store.result(f"{shadow}:1", "local") is None
            for path in ("save_weights", "save_weights_for_sampler", "save_weights_external"):
                refused = await app.post(path, {"model_id": shadow, "seq_id": 9, "path": "x", "ttl_seconds": 3600})
                assert refused.status_code == 400
                assert "shadow" in refused.json()["detail"]
            info = await app.post("get_info", {"model_id": shadow})
            assert info.json()["lora_rank"] == 4
        async with api(tmp_path) as app:
            assert (await app.post("forward_backward", pass_body(shadow, 2))).status_code == 404
            assert loss_in(await app.result((await app.post("forward_backward", pass_body(model, 9))).json()))

    run(main)


@pytest.mark.parametrize("end", ["session", "ttl"])
def test_shadow_is_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    monkeypatch.setattr("tinsmith.service.sessions.CLEANUP_S", 0.05)

    async def main() -> None:
        start = Factory()
        async with api(tmp_path, start) as app:
            model = await trained(app)
            metadata = {"role": "shadow", "ttl": "0.2" if end == "ttl" else "600"}
            path = f"tinker://{model}/weights/@live"
            shadow = (await fork(app, path, user_metadata=metadata))["model_id"]
            if end == "session":
                finish = f"/api/v1/sessions/{shadow.split(':')[0]}/finish"
                await app.send("POST", finish, {"reason": {"type": "success"}})
            await until(lambda: not app.service.store.shadows)
            await until(lambda: list(start.made[0].engine._models) == [model])  # type: ignore[attr-defined]
            refused = await app.post("forward_backward", pass_body(shadow, 1))
            assert refused.status_code == 404
            assert "ttl" in refused.json()["detail"]

    run(main)


def test_shadow_outlives_its_source_but_not_the_engine(tmp_path: Path) -> None:
    async def main() -> None:
        start = Factory()
        async with api(tmp_path, start) as app:
            model = await trained(app)
            here = await loss(app, model, 3, forward=True)
            shadow = (await fork(app, f"tinker://{model}/weights/@live"))["model_id"]
            await app.call("unload_model", {"model_id": model, "type": "unload_model"})
            assert await loss(app, shadow, 1, forward=True) == here
            start.kill()
            answer = await app.call("optim_step", {"model_id": shadow, "seq_id": 2, "adam_params": {}})
            assert "ended with the engine" in answer["error"]

    run(main)


def test_error_in_a_shadow_fails_that_request_alone(tmp_path: Path) -> None:
    async def main() -> None:
        start = Factory()
        async with api(tmp_path, start) as app:
            model = await trained(app)
            path = f"tinker://{model}/weights/@live"
            first, second = [(await fork(app, path))["model_id"] for _ in range(2)]
            before, twin = weights(start, model), weights(start, second)
            refused = await app.post("forward_backward", pass_body(first, 1, (5, 10**6)))
            assert refused.status_code == 400
            assert same(before, weights(start, model))
            assert same(twin, weights(start, second))
            assert await loss(app, first, 1) == await loss(app, second, 1)

    run(main)


def test_limits_and_faults_are_refused_by_name(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path, shadows=2) as app:
            model = await trained(app)
            path = f"tinker://{model}/weights/@live"
            body = {"session_id": await session(app), "model_seq_id": 0, "path": path}
            plain = await app.post("load_weights", body)
            assert "Only a shadow" in plain.json()["detail"]
            missing = await app.post("load_weights", body | {"path": f"tinker://{model}0/weights/@live"})
            assert missing.status_code == 404
            stranger = await app.tenant("mallory")
            other = {"session_id": await session(stranger), "user_metadata": SHADOW}
            assert (await stranger.post("load_weights", body | other)).status_code == 404
            named = await app.post("save_weights", {"model_id": model, "seq_id": 3, "path": "@live"})
            assert "@live" in named.json()["detail"]
            for _ in range(2):
                await fork(app, path)
            third = await app.post("load_weights", body | {"user_metadata": SHADOW})
            assert third.status_code == 403
            assert "2 shadows" in third.json()["detail"]

    run(main)


@pytest.mark.parametrize(("ttl", "seconds"), [("30", 30.0), (45, 45.0), (None, 600.0)])
def test_ttl_is_read_from_the_metadata(ttl: object, seconds: float) -> None:
    metadata = {"role": "shadow"} | ({} if ttl is None else {"ttl": ttl})
    assert shadow_ttl(metadata) == seconds
    assert shadow_ttl({"role": "main"}) is None
    assert shadow_ttl(None) is None


@pytest.mark.parametrize("ttl", ["soon", "0", "-5", "1e9", "nan"])
def test_ttl_that_is_no_time_is_refused(ttl: str) -> None:
    from tinsmith.errors import BadRequest

    with pytest.raises(BadRequest, match="ttl of a shadow"):
        shadow_ttl({"role": "shadow", "ttl": ttl})
