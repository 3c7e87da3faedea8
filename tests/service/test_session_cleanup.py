"""What a session held is gone after its end, also what it came to hold while it ended or since."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.service.inprocess import Api, Factory, MortalEngine, api, pass_body, until
from tests.service.routes.test_futures import base_sampler, poll, sample_body
from tinsmith.engine.config import EngineConfig
from tinsmith.service.engines.host import RunningEngine
from tinsmith.service.storage.records import Checkpoint, Model
from tinsmith.service.tenancy.keys import set_quotas


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinsmith.service.sessions.CLEANUP_S", 0.05)


async def _wait(event: asyncio.Event) -> None:
    await event.wait()


async def finish(on: Api, session: str) -> None:
    answer = await on.send("POST", f"/api/v1/sessions/{session}/finish", {"reason": {"type": "success"}})
    assert answer.status_code == 204


def unnamed(model: str, seq: int) -> dict:
    return {"model_id": model, "seq_id": seq, "sampling_session_seq_id": seq, "kind": "snapshot"}


def nothing_is_left(on: Api, engine: MortalEngine) -> bool:
    return (
        all(one.state == "ended" for one in on.service.store.all(Model))
        and not on.service.store.all(Checkpoint)
        and not list(on.service.config.data.glob("checkpoints/*"))
        and not engine._versions
        and not engine._models
    )


def test_an_unnamed_save_that_is_queued_when_its_session_ends_is_gone_after_it(tmp_path: Path) -> None:
    async def main() -> None:
        start, go = Factory(), asyncio.Event()
        start.hook = lambda call, argument: _wait(go) if call == "run" else None
        async with api(tmp_path, start) as on:
            model = await on.model()
            await on.post("forward_backward", pass_body(model, 1))
            saved = (await on.post("save_weights_for_sampler", unnamed(model, 2))).json()
            await finish(on, model.split(":")[0])
            go.set()
            assert "sampling_session_id" in (await on.result(saved)).json()
            await until(lambda: nothing_is_left(on, start.made[0].engine))  # type: ignore[arg-type]

    asyncio.run(main())


@pytest.mark.parametrize("later", range(0, 12, 2))
def test_a_model_that_is_being_made_when_its_session_ends_ends_too(tmp_path: Path, later: int) -> None:
    async def main() -> None:
        start = Factory()
        async with api(tmp_path, start) as on:
            session = (await on.post("create_session", {"tags": []})).json()["session_id"]
            making = asyncio.create_task(on.model(session))
            for _ in range(later):
                await asyncio.sleep(0)
            await finish(on, session)
            await asyncio.gather(making, return_exceptions=True)  # refused, if it came after the end
            await until(lambda: nothing_is_left(on, start.made[0].engine))  # type: ignore[arg-type]

    asyncio.run(main())


def test_an_engine_that_dies_while_a_session_ends_leaves_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        start = _Dying()
        async with api(tmp_path, start) as on:
            model = await on.model()
            for seq in range(1, 4):
                await on.call("save_weights_for_sampler", unnamed(model, seq))
            await until(lambda: all(one.ready for one in on.service.store.all(Checkpoint)))
            await finish(on, model.split(":")[0])
            await until(lambda: len(start.made) == 2 and nothing_is_left(on, start.made[1].engine))  # type: ignore[arg-type]

    asyncio.run(main())


class _Dying(Factory):
    """Its first engine dies of its first detach."""

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


def test_models_whose_base_model_is_no_longer_served_end_with_their_session(tmp_path: Path) -> None:
    async def main() -> None:
        start, never = Factory(), asyncio.Event()
        start.hook = lambda call, argument: _wait(never) if call == "run" else None
        async with api(tmp_path, start, capture_every=1) as on:
            ended, promised = await on.model(), await on.model()
            await on.step(ended, 1)
            await on.post("forward_backward", pass_body(promised, 1))
            await on.post("save_weights", {"model_id": promised, "seq_id": 2, "path": "last"})
            await set_quotas(on.service.store.database, "local", {"models": 2})
        async with api(tmp_path, models=("other",)) as on:
            for model in (ended, promised):
                await finish(on, model.split(":")[0])
            await until(lambda: on.service.model(ended, "local").state == "ended")
            await until(
                lambda: not list(tmp_path.glob("journal/*/*"))
            )  # the folder is removed after the record changed
            assert on.service.model(promised, "local").state == "live", "its save is promised still"
            body = {"base_model": "other", "lora_config": {"rank": 4}, "model_seq_id": 0}
            session = (await on.post("create_session", {"tags": []})).json()["session_id"]
            assert (await on.post("create_model", {**body, "session_id": session})).status_code == 200
        async with api(tmp_path) as on:
            await until(lambda: on.service.model(promised, "local").state == "ended")
            assert on.service.checkpoints.by_name(promised, "weights", "last") is not None

    asyncio.run(main())


def test_unacknowledged_samples_go_with_their_session(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path, retention_s=2.0) as on:
            sampler = await base_sampler(on)
            futures = on.service.futures
            promises = [(await on.post("asample", sample_body(sampler, seq))).json() for seq in range(3)]
            await until(lambda: futures.pending("local") == 0)
            for clone in range(5, 50):
                assert (await poll(on, sampler, clone=clone, timeout=0)).json()["completions"] == []
            assert len(futures.completions._logs) == 1
            await finish(on, sampler.split(":")[0])
            body = (await poll(on, sampler, timeout=0)).json()["completions"]
            assert len(body) == 3, "a clone elsewhere may still fetch them"
            await until(lambda: not futures.completions._logs)
            assert not any(one["request_id"] in futures._unfinished for one in promises)

    asyncio.run(main())
