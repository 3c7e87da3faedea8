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


def test_aged_out_versions_equal_the_definition() -> None:
    """A version stays if it is among the newest of its run, or was created or sampled from within the retention."""
    draw = random.Random(3)
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
        limits = VersionLimits(newest=draw.randrange(1, 4), retention_s=draw.uniform(1, 99))
        expected = set()
        for each in versions:
            newer = sum(other.run == each.run and other.created > each.created for other in versions)
            last = max(each.created, sampled.get(each.id, 0.0))
            if newer >= limits.newest and last < 100 - limits.retention_s:
                expected.add(each.id)
        assert {old.id for old in use.aged_out(versions, (), limits)} == expected


def test_versions_in_use_never_age_out() -> None:
    now = [0.0]
    use = VersionUse(lambda: now[0])
    versions = [version(0, 0.0), version(1, 1.0, ready=False), version(2, 2.0), version(3, 3.0, kind="weights")]
    versions.append(version(4, 4.0))
    now[0] = 1000.0
    limits = VersionLimits(newest=1, retention_s=10.0)

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
            assert {folder.name for folder in (tmp_path / "checkpoints").glob("[!.]*")} == stayed
            assert set(engine._versions) == stayed
            answer = await sampled(app, samplers[0], 1)
            assert answer.status_code == 200
            assert "save the weights again" in answer.json()["error"].lower()
            assert (await sampled(app, samplers[3], 0)).headers["content-type"] == "application/x-protobuf"

    asyncio.run(main())


def test_low_disk_shortens_the_retention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinsmith.service.budgets.disk.CACHE_S", 0.0)
    monkeypatch.setattr("tinsmith.service.sessions.LOW_DISK_RETENTION_S", 0.0)

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
