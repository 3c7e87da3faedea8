"""Unnamed sampler versions: which age out, and what a later sample from them answers."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.service.routes.test_futures import sample_body
from tests.service.support.inprocess import Api, Factory, MortalEngine, api, until
from tinsmith.engine.base import LoraSpec
from tinsmith.service.budgets.versions import VersionLimits, VersionUse
from tinsmith.service.storage.records import Checkpoint, SamplingSession


def version(number: int, created: float, run: str = "m", **values) -> Checkpoint:
    made = Checkpoint(
        id=f"{run}{number}",
        owner="o",
        run=run,
        kind="ephemeral",
        name=str(number),
        base_model="toy",
        lora=LoraSpec(rank=1, seed=0),
        created=created,
        made_by="",
    )
    return replace(made, **values)


def test_aged_out_versions_equal_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version stays if it is among the newest of its run or in use, or else if it is within the retention and among
    the `most` that were used last."""
    draw = random.Random(3)
    monkeypatch.setattr("tinsmith.service.budgets.versions.IN_USE_S", 20.0)
    for _ in range(200):
        now = [0.0]
        use = VersionUse(lambda now=now: now[0])
        versions = [version(n, draw.uniform(0, 100), draw.choice("mn")) for n in range(draw.randrange(12))]
        sampled = {}
        for each in draw.sample(versions, len(versions) // 3):
            now[0] = sampled[each.id] = draw.uniform(0, 100)

            async def sample(version_id: str = each.id, use: VersionUse = use) -> None:
                async with use.sampling(version_id):
                    pass

            asyncio.run(sample())
        now[0] = 100.0
        limits = VersionLimits(newest=draw.randrange(1, 4), most=draw.randrange(1, 7), retention_s=draw.uniform(1, 99))
        expected = set()
        for run in "mn":
            of_run = [each for each in versions if each.run == run]
            last = {each.id: max(each.created, sampled.get(each.id, 0.0)) for each in of_run}
            newest = sorted(of_run, key=lambda each: each.created)[-limits.newest :]
            for each in sorted((each for each in of_run if each not in newest), key=lambda each: last[each.id]):
                is_excess = len({each.id for each in of_run} - expected) > limits.most
                if last[each.id] < 100 - limits.retention_s or (last[each.id] < 80 and is_excess):
                    expected.add(each.id)
        assert {old.id for old in use.aged_out(versions, (), limits)} == expected


def test_versions_in_use_never_age_out() -> None:
    now = [0.0]
    use = VersionUse(lambda: now[0])
    versions = [version(0, 0.0), version(1, 1.0, ready=False), version(2, 2.0), version(3, 3.0, kind="weights")]
    versions.append(version(4, 4.0))
    now[0] = 1000.0
    limits = VersionLimits(newest=1, most=9, retention_s=10.0)

    async def main() -> None:
        async with use.sampling("m0"), use.sampling(None):
            assert use.aged_out(versions, ["m2"], limits) == []
            assert use.aged_out(versions, [], limits) == [versions[2]]

    asyncio.run(main())


async def unnamed(app: Api, model: str, seq: int, **options) -> str:
    body = {"model_id": model, "seq_id": seq, "sampling_session_seq_id": seq, **options}
    return (await app.call("save_weights_for_sampler", body))["sampling_session_id"]


async def sampled(app: Api, sampler: str, seq: int):
    return await app.result((await app.post("asample", sample_body(sampler, seq))).json())


def test_old_version_is_deleted_and_its_samples_fail(tmp_path: Path) -> None:
    """Fails without `_age_versions` in the cleanup. A 410 would make the SDK submit the sample again and again."""

    async def main() -> None:
        start = Factory()
        async with api(tmp_path, start, sampler_versions=2, version_retention_s=0.3) as app:
            model = await app.model()
            samplers = [await unnamed(app, model, seq) for seq in range(1, 6)]
            await until(lambda: all(each.ready for each in app.service.store.all(Checkpoint)))
            assert (await sampled(app, samplers[0], 0)).status_code == 200
            await asyncio.sleep(0.35)
            app.service.sessions.wake()
            await until(lambda: len(app.service.store.all(Checkpoint)) == 2)
            engine = start.made[0].engine
            assert isinstance(engine, MortalEngine)
            stayed = {app.service.store.find(SamplingSession, sampler).version for sampler in samplers[3:]}  # type: ignore[union-attr]
            folders = tmp_path / "checkpoints"  # are deleted after their records
            await until(lambda: {folder.name for folder in folders.glob("[!.]*")} == stayed)
            await until(lambda: set(engine._versions) == stayed)
            answer = await app.post("asample", sample_body(samplers[0], 1))
            assert answer.status_code == 404
            assert "save the weights again" in answer.text
            assert len(app.service.store.all(SamplingSession)) == 2  # else a run would leave one at each step
            assert (await sampled(app, samplers[3], 0)).headers["content-type"] == "application/x-protobuf"

    asyncio.run(main())


def test_low_disk_shortens_the_retention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinsmith.service.budgets.disk.CACHE_S", 0.0)
    monkeypatch.setattr("tinsmith.service.sessions.IN_USE_S", 0.0)

    async def main() -> None:
        async with api(tmp_path, sampler_versions=1) as app:
            model = await app.model()
            for seq in range(1, 4):
                await unnamed(app, model, seq)
            await until(lambda: all(each.ready for each in app.service.store.all(Checkpoint)))
            app.service.sessions.wake()
            await asyncio.sleep(0.05)
            assert len(app.service.store.all(Checkpoint)) == 3
            assert "tinsmith_unnamed_version_bytes 0.0" not in (await app.http.get("/metrics")).text
            app.service.disk._measure = lambda folder: 0
            app.service.sessions.wake()
            await until(lambda: len(app.service.store.all(Checkpoint)) == 1)

    asyncio.run(main())


def test_saves_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions that are not on disk take memory. Fails without `wait_for_room` in the save of unnamed weights."""
    monkeypatch.setattr("tinsmith.service.training.background_writes.MAX_UNWRITTEN", 2)

    async def main() -> None:
        start = Factory()
        async with api(tmp_path, start) as app:
            model = await app.model()
            engine = start.made[0].engine
            assert isinstance(engine, MortalEngine)
            persist, free = engine.persist, asyncio.Event()

            async def slow(version: str, to: Path) -> int:
                await free.wait()
                return await persist(version, to)

            monkeypatch.setattr(engine, "persist", slow)
            saves = [asyncio.create_task(unnamed(app, model, seq)) for seq in range(1, 5)]
            await until(lambda: sum(save.done() for save in saves) == 2)
            await asyncio.sleep(0.05)
            assert sum(save.done() for save in saves) == 2
            free.set()
            assert len(set(await asyncio.gather(*saves))) == 4

    asyncio.run(main())


def test_saves_fail_while_writes_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that waited for a full disk would hold up the requests of all models."""
    monkeypatch.setattr("tinsmith.service.training.background_writes.MAX_UNWRITTEN", 1)

    async def main() -> None:
        start = Factory()
        async with api(tmp_path, start) as app:
            model = await app.model()

            async def failing(version: str, to: Path) -> int:
                raise OSError(28, "No space left on device")

            monkeypatch.setattr(start.made[0].engine, "persist", failing)
            await unnamed(app, model, 1)
            body = {"model_id": model, "seq_id": 2, "sampling_session_seq_id": 2}
            answer = await app.result((await app.post("save_weights_for_sampler", body)).json())
            assert "No space left on device" in answer.json()["error"]

    asyncio.run(main())
