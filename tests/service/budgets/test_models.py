"""Memory of models in training: admission, eviction, and restoration that changes no bit."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from tests.service.support.inprocess import Api, Factory, MortalEngine, api, pass_body, trained, until
from tinsmith.engine.base import LoraSpec
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.fake.engine import FakeEngine
from tinsmith.errors import Busy, Forbidden
from tinsmith.service.budgets.models import (
    ModelUse,
    check_new_model,
    idle_models,
    memory_limit,
    model_bytes,
    models_to_evict,
)
from tinsmith.service.storage.records import Checkpoint

CARD = FakeEngine(EngineConfig(source="toy", kind="fake")).card
RANK_4 = model_bytes(LoraSpec(rank=4, seed=0), CARD)


def use(name: str, size: int = 10, unused_s: float = 0.0, **values: bool) -> ModelUse:
    return ModelUse(id=name, size_bytes=size, unused_s=unused_s, **values)


def test_bytes_are_those_of_the_tensors() -> None:
    async def main() -> None:
        engine = FakeEngine(EngineConfig(source="toy", kind="fake"))
        await engine.create("m", LoraSpec(rank=4, seed=0))
        model = engine._models["m"]
        arrays = [model.weights.a, model.weights.b, *model.grad, *model.moments]
        assert sum(array.nbytes for array in arrays) == RANK_4

    asyncio.run(main())
    assert model_bytes(LoraSpec(rank=4, seed=0, train_unembed=False), CARD) == 0
    assert memory_limit(5, CARD) == 5
    assert memory_limit(None, CARD) is None


def test_idle_models_are_unused_ones_sooner_without_a_client() -> None:
    models = [
        use("used", unused_s=99),
        use("idle", unused_s=900),
        use("queued", unused_s=900, is_queued=True),
        use("gone", unused_s=900, is_loaded=False),
        use("silent", unused_s=120, is_silent=True),
    ]
    assert idle_models(models, 900) == ["idle", "silent"]
    assert idle_models(models, 50) == ["used", "idle", "silent"]


def test_evicted_models_are_the_fewest_least_recently_used() -> None:
    """Every model that goes was needed to go, and no model that stays was unused for longer."""
    draw = random.Random(1)
    for _ in range(300):
        models = [
            use(str(n), draw.randrange(1, 9), draw.uniform(0, 9), is_loaded=draw.random() < 0.8, is_queued=n % 3 == 0)
            for n in range(draw.randrange(8))
        ]
        pinned = {model.id for model in models if draw.random() < 0.3}
        size, limit = draw.randrange(9), draw.randrange(1, 30)
        loaded = {model.id: model for model in models if model.is_loaded}
        evicted = models_to_evict(models, size, limit, pinned)

        def used_without(gone: list[str], loaded: dict[str, ModelUse] = loaded, size: int = size) -> int:
            return size + sum(model.size_bytes for model in loaded.values() if model.id not in gone)

        free = [model.id for model in loaded.values() if model.id not in pinned]
        if evicted is None:
            assert used_without(free) > limit
            continue
        assert set(evicted) <= set(free)
        assert used_without(evicted) <= limit
        if evicted:
            assert used_without(evicted[:-1]) > limit
            last = loaded[evicted[-1]]
            for other in set(free) - set(evicted):
                assert (loaded[other].is_queued, -loaded[other].unused_s) >= (last.is_queued, -last.unused_s)
    assert models_to_evict([use("a", 100)], 100, None, ()) == []


def test_new_models_need_room_beside_those_in_use() -> None:
    models = [use("a", 60), use("b", 60, unused_s=200), use("c", 60, is_silent=True)]
    check_new_model(models, 40, 100)
    check_new_model(models, 10**9, None)
    with pytest.raises(Forbidden, match=r"needs 101 B in training; model_memory is 100 B\. Use a lower rank"):
        check_new_model(models, 101, 100)
    with pytest.raises(Busy, match="needs 41 B in training; 1 model in use: 60 B of 100 B"):
        check_new_model(models, 41, 100)
    with pytest.raises(Busy):
        check_new_model([use("b", 60, unused_s=200, is_queued=True)], 41, 100)


def loaded(start: Factory) -> set[str]:
    engine = start.made[-1].engine
    assert isinstance(engine, MortalEngine)
    return set(engine._models)


def weights(start: Factory, model: str) -> tuple[bytes, ...]:
    engine = start.made[-1].engine
    assert isinstance(engine, MortalEngine)
    trained = engine._models[model]
    return tuple(each.tobytes() for each in (trained.weights.a, trained.weights.b, *trained.moments, *trained.grad))


def test_idle_models_are_evicted_with_one_look_at_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Break `evict_idle`: look at all models for each that is idle."""

    async def main() -> None:
        async with api(tmp_path, Factory(), idle_model_s=1e-9) as app:
            for _ in range(6):
                await app.model()
            [worker] = app.service.base_models.distinct_workers()
            evictor = worker._execution.evictor
            looks, use_of = [], evictor._use_of
            monkeypatch.setattr(evictor, "_use_of", lambda model: looks.append(model.id) or use_of(model))
            await worker.evict_idle()
            assert not any(model.is_loaded for model in worker.models())
            assert len(looks) <= 6 + 6 + 6  # the list, the second look at each, and the line above

    asyncio.run(main())


def test_evicted_models_train_on_as_if_never_evicted(tmp_path: Path) -> None:
    """Fails without `holding` around a batch (too many models), or without the capture in `_evict` (lost steps)."""

    async def main() -> None:
        calm_start, start = Factory(), Factory()
        async with api(tmp_path / "a", calm_start) as calm, api(tmp_path / "b", start, model_memory=2 * RANK_4) as app:
            models: list[list[str]] = []
            for each in (calm, app):
                session = (await each.post("create_session", {"tags": []})).json()["session_id"]
                models.append([])
                for number in range(4):
                    models[-1].append(await created(each, session, number))
            losses: list[list[list[float]]] = [[], []]
            for turn in range(3):
                for number in range(4):
                    for which, each in enumerate((calm, app)):
                        model = models[which][number]
                        losses[which].append(await trained(each, model, 1 + 3 * turn))
                        await each.post("forward_backward", pass_body(model, 3 + 3 * turn))  # a gradient to keep
                        assert len(loaded(start)) <= 2
            assert losses[0] == losses[1]
            for calm_model, model in zip(*models, strict=True):
                await app.result((await app.post("forward_backward", pass_body(model, 20, forward_only=True))).json())
                assert weights(calm_start, calm_model) == weights(start, model)
            metrics = (await app.http.get("/metrics")).text
            assert f'tinsmith_model_memory_bytes{{model="toy"}} {2 * RANK_4}.0' in metrics
            assert f'tinsmith_model_memory_limit_bytes{{model="toy"}} {2 * RANK_4}.0' in metrics
            assert 'tinsmith_evicted_models{model="toy"} 2.0' in metrics

    asyncio.run(main())


async def created(app: Api, session: str, number: int) -> str:
    """A model, created as if its session's other models had been unused for a while."""
    for state in app.service.workers["toy"]._states.values():
        state.used = -1e9
    return await app.model(session, number, seed=number)


def test_many_models_at_once_stay_within_the_memory(tmp_path: Path) -> None:
    async def main() -> None:
        start, most = Factory(), 0

        def watch(call: str, argument: object) -> None:
            nonlocal most
            most = max(most, len(loaded(start)))

        start.hook = watch
        async with api(tmp_path, start, model_memory=3 * RANK_4) as app:
            session = (await app.post("create_session", {"tags": []})).json()["session_id"]
            models = [await created(app, session, number) for number in range(8)]
            async with asyncio.timeout(120):
                await asyncio.gather(*(trained(app, model, 1, 3) for model in models))
            assert most == 3

    asyncio.run(main())


def test_model_that_cannot_fit_is_refused(tmp_path: Path) -> None:
    """Fails without `check_new` in `accept`."""

    async def main() -> None:
        async with api(tmp_path, model_memory=2 * RANK_4) as app:
            session = (await app.post("create_session", {"tags": []})).json()["session_id"]
            body = {"session_id": session, "model_seq_id": 0, "base_model": "toy", "lora_config": {"rank": 9}}
            answer = await app.post("create_model", body)
            assert (answer.status_code, "model_memory is" in answer.json()["detail"]) == (403, True)
            for number in (0, 1):
                await trained(app, await app.model(session, number), 1)
            answer = await app.post("create_model", {**body, "model_seq_id": 2, "lora_config": {"rank": 4}})
            assert (answer.status_code, "2 models in use" in answer.json()["detail"]) == (429, True)

    asyncio.run(main())


def test_idle_model_is_evicted_with_its_unwritten_versions(tmp_path: Path) -> None:
    """Fails without `evict_idle` in the cleanup."""

    async def main() -> None:
        start, go = Factory(), asyncio.Event()
        start.hook = lambda call, argument: go.wait() if call == "persist" else None  # type: ignore[return-value]
        async with api(tmp_path, start, idle_model_s=0.2) as app:
            model = await app.model(seed=1)
            losses = await trained(app, model, 1, 2)
            await app.call("save_weights_for_sampler", {"model_id": model, "seq_id": 5, "sampling_session_seq_id": 0})
            await asyncio.sleep(0.25)
            app.service.sessions.wake()
            await asyncio.sleep(0.05)
            assert loaded(start) == {model}, "its version is only in memory"
            go.set()
            await until(lambda: all(version.ready for version in app.service.store.all(Checkpoint)))
            app.service.sessions.wake()
            await until(lambda: not loaded(start))
            assert all(version.ready for version in app.service.store.all(Checkpoint))
            losses += await trained(app, model, 6, 2)
        async with api(tmp_path / "calm") as calm:
            assert losses == await trained(calm, await calm.model(seed=1), 1, 4)

    asyncio.run(main())


def test_low_disk_evicts_without_a_capture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinsmith.service.budgets.disk.CACHE_S", 0.0)

    async def main() -> None:
        start = Factory()
        async with api(tmp_path, start, idle_model_s=0.1, capture_every=1, disk_reserve=1000) as app:
            model = await app.model(seed=1)
            app.service.disk._measure = lambda folder: 999
            losses = await trained(app, model, 1, 2)
            await asyncio.sleep(0.15)
            app.service.sessions.wake()
            await until(lambda: not loaded(start))
            assert not list((tmp_path / "journal").glob("*/*"))
            losses += await trained(app, model, 5, 1)
            app.service.disk._measure = lambda folder: 1000
            losses += await trained(app, model, 7, 1)
            await until(lambda: len(list((tmp_path / "journal").glob("*/*"))) == 1)
        async with api(tmp_path / "calm") as calm:
            assert losses == await trained(calm, await calm.model(seed=1), 1, 4)

    asyncio.run(main())
