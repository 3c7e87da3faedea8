"""Cleanup after a session: its models, versions, checkpoints and samples are removed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from sqlalchemy import event

from tests.service.routes.test_futures import base_sampler, poll, sample_body
from tests.service.support.inprocess import Api, Factory, MortalEngine, api, pass_body, until
from tinsmith.engine.config import EngineConfig
from tinsmith.service.engines.host import RunningEngine
from tinsmith.service.storage.records import Checkpoint, Model, SamplingSession, Session
from tinsmith.service.tenancy.keys import set_quotas


@pytest.fixture(autouse=True)
def frequent_cleanup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinsmith.service.sessions.CLEANUP_S", 0.05)


async def _wait(event: asyncio.Event) -> None:
    await event.wait()


async def finish(app: Api, session: str) -> None:
    answer = await app.send("POST", f"/api/v1/sessions/{session}/finish", {"reason": {"type": "success"}})
    assert answer.status_code == 204


def unnamed(model: str, seq: int) -> dict:
    return {"model_id": model, "seq_id": seq, "sampling_session_seq_id": seq, "kind": "snapshot"}


def is_clean(app: Api, engine: MortalEngine) -> bool:
    return (
        all(model.state == "ended" for model in app.service.store.all(Model))
        and not app.service.store.all(Checkpoint)
        and not list(app.service.config.data.glob("checkpoints/*"))
        and not engine._versions
        and not engine._models
    )


def test_queued_unnamed_save_is_removed_after_session_end(tmp_path: Path) -> None:
    async def main() -> None:
        start, go = Factory(), asyncio.Event()
        start.hook = lambda call, argument: _wait(go) if call == "run" else None
        async with api(tmp_path, start) as app:
            model = await app.model()
            await app.post("forward_backward", pass_body(model, 1))
            saved = (await app.post("save_weights_for_sampler", unnamed(model, 2))).json()
            await finish(app, model.split(":")[0])
            go.set()
            assert "sampling_session_id" in (await app.result(saved)).json()
            await until(lambda: is_clean(app, start.made[0].engine))  # type: ignore[arg-type]

    asyncio.run(main())


@pytest.mark.parametrize("later", range(0, 12, 2))
def test_model_under_creation_ends_with_its_session(tmp_path: Path, later: int) -> None:
    async def main() -> None:
        start = Factory()
        async with api(tmp_path, start) as app:
            session = (await app.post("create_session", {"tags": []})).json()["session_id"]
            making = asyncio.create_task(app.model(session))
            for _ in range(later):
                await asyncio.sleep(0)
            await finish(app, session)
            await asyncio.gather(making, return_exceptions=True)  # refused if it arrives after the end
            await until(lambda: is_clean(app, start.made[0].engine))  # type: ignore[arg-type]

    asyncio.run(main())


def test_engine_death_during_cleanup_leaves_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        start = _DyingFactory()
        async with api(tmp_path, start) as app:
            model = await app.model()
            for seq in range(1, 4):
                await app.call("save_weights_for_sampler", unnamed(model, seq))
            await until(lambda: all(checkpoint.ready for checkpoint in app.service.store.all(Checkpoint)))
            await finish(app, model.split(":")[0])
            await until(lambda: len(start.made) == 2 and is_clean(app, start.made[1].engine))  # type: ignore[arg-type]

    asyncio.run(main())


class _DyingFactory(Factory):
    """A factory whose first engine dies at its first detach."""

    async def __call__(self, config: EngineConfig) -> RunningEngine:
        died, first = asyncio.Event(), not self.made

        class Engine(MortalEngine):
            async def detach(self, version: str) -> None:
                if first:
                    died.set()
                await self._live("detach", version)
                await super().detach(version)

        self.made.append(RunningEngine(engine=Engine(config, lambda call, argument: None, died), died=died))
        return self.made[-1]


def test_models_of_unserved_base_models_end_with_their_session(tmp_path: Path) -> None:
    async def main() -> None:
        start, never = Factory(), asyncio.Event()
        start.hook = lambda call, argument: _wait(never) if call == "run" else None
        async with api(tmp_path, start, capture_every=1) as app:
            ended, promised = await app.model(), await app.model()
            await app.step(ended, 1)
            await app.post("forward_backward", pass_body(promised, 1))
            await app.post("save_weights", {"model_id": promised, "seq_id": 2, "path": "last"})
            await set_quotas(app.service.store.database, "local", {"models": 2})
        async with api(tmp_path, models=("other",)) as app:
            for model in (ended, promised):
                await finish(app, model.split(":")[0])
            await until(lambda: app.service.model(ended, "local").state == "ended")
            # The folder is removed after the record has changed.
            await until(lambda: not list(tmp_path.glob("journal/*/*")))
            assert app.service.model(promised, "local").state == "live", "its save is still queued"
            body = {"base_model": "other", "lora_config": {"rank": 4}, "model_seq_id": 0}
            session = (await app.post("create_session", {"tags": []})).json()["session_id"]
            assert (await app.post("create_model", {**body, "session_id": session})).status_code == 200
        async with api(tmp_path) as app:
            await until(lambda: app.service.model(promised, "local").state == "ended")
            assert app.service.checkpoints.by_name(promised, "weights", "last") is not None

    asyncio.run(main())


def test_unacknowledged_samples_are_removed_with_their_session(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path) as app:
            sampler = await base_sampler(app)
            futures = app.service.futures
            promises = [(await app.post("asample", sample_body(sampler, seq))).json() for seq in range(3)]
            await until(lambda: futures.pending("local") == 0)
            for clone in range(5, 50):
                assert (await poll(app, sampler, clone=clone, timeout=0)).json()["completions"] == []
            assert len(futures.completions._logs) == 1
            await finish(app, sampler.split(":")[0])
            body = (await poll(app, sampler, timeout=0)).json()["completions"]
            assert len(body) == 3, "another clone may still fetch them"
            for promise in promises:  # as `retention_s` after their ends
                futures._expiry.start(promise["request_id"], 0.01)
            await until(lambda: not futures.completions._logs)
            assert not any(promise["request_id"] in futures._unfinished for promise in promises)

    asyncio.run(main())


def test_session_with_many_versions_ends_with_few_commits(tmp_path: Path) -> None:
    """Break `release_versions`: await one release after another."""

    async def main() -> None:
        async with api(tmp_path) as app:
            store, model = app.service.store, await app.model()
            session, base = model.split(":")[0], app.service.model(model, "local")
            versions = [
                Checkpoint(
                    id=f"v{n}", owner="local", run=model, kind="ephemeral", name=f"{session}:sample:{n}",
                    base_model="toy", lora=base.lora, created=1.0, made_by="r",
                )
                for n in range(1000)
            ]  # fmt: skip
            samplers = [
                SamplingSession(
                    id=each.name, owner="local", session_id=session, base_model="toy", created=1.0, version=each.id
                )
                for each in versions
            ]
            await store.put(*versions, *samplers)
            commits: list[object] = []
            event.listen(store._sync_engine, "commit", commits.append)
            await finish(app, session)
            assert not store.all(Checkpoint)
            assert len(commits) < 300

    asyncio.run(main())


def test_ended_session_is_forgotten_with_its_idempotency_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinsmith.service.sessions.PRUNE_S", 0.1)

    async def main() -> None:
        async with api(tmp_path, ended_retention_s=0.0) as app:

            async def create() -> str:
                made = await app.send("POST", "/api/v1/create_session", {"tags": []}, **{"X-Idempotency-Key": "k"})
                return made.json()["session_id"]

            session = await create()
            assert await create() == session
            model = await app.model(session)
            await finish(app, session)
            await until(lambda: app.service.store.find(Session, session) is None)
            assert app.service.store.find(Model, model) is None
            assert await create() != session

    asyncio.run(main())
