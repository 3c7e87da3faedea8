"""A service whose engines do not see its data folder: they read and write objects, and no folder appears here."""

from __future__ import annotations

import asyncio
import io
import tarfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pyrage
import pytest

from tests.service.support.inprocess import Api, api, loss_in, pass_body, trained, until
from tinsmith.engine.adapters.cache import ObjectCache, ObjectSettings
from tinsmith.engine.adapters.cached_engine import CachedEngine
from tinsmith.engine.adapters.store import ObjectStore, StoreUnavailableError
from tinsmith.engine.adapters.transfer import FolderTransfer, TransferringEngine
from tinsmith.engine.base import LoraSpec
from tinsmith.engine.cluster.config import ClusterConfig
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.exchange.archive import CONFIG, WEIGHTS
from tinsmith.engine.fake.engine import FakeEngine
from tinsmith.engine.processes.rpc import DelegatingEngine
from tinsmith.errors import EngineDied
from tinsmith.service.engines.clusters import ClusterFactory
from tinsmith.service.engines.host import RunningEngine
from tinsmith.service.storage import object_copies
from tinsmith.service.storage.object_copies import UNNAMED_S
from tinsmith.service.storage.records import Checkpoint, Model, StoredObject


class Process(DelegatingEngine):
    """An engine on another machine, which refuses every path of the service's machine."""

    def __init__(self, engine: CachedEngine, hidden: Path, died: asyncio.Event) -> None:
        super().__init__(engine)
        self._hidden, self._died = hidden, died

    async def call(self, method: Any, *args: Any, **options: Any) -> Any:
        if self._died.is_set():
            raise EngineDied("The engine is dead.", from_outside=True)
        assert not any(str(argument).startswith(str(self._hidden)) for argument in args), (method, args)
        return await super().call(method, *args, **options)


class Elsewhere(ClusterFactory):
    """Starts engines on another machine, each with a cache of its own; `kill` ends the newest."""

    def __init__(self, tmp_path: Path) -> None:
        self._settings = ObjectSettings(url=(tmp_path / "store").as_uri(), cache_bytes=1 << 30)
        super().__init__(ClusterConfig(), tmp_path / "data", FolderTransfer(self._settings))
        self.transfer.through_store = True
        self.made: list[tuple[Process, asyncio.Event]] = []
        self._tmp_path = tmp_path

    async def __call__(self, config: EngineConfig) -> RunningEngine:
        died = asyncio.Event()
        cache = ObjectCache(ObjectStore(self._settings.url), self._tmp_path / f"cache{len(self.made)}", 1 << 30)
        process = Process(CachedEngine(FakeEngine(config), cache), self._tmp_path / "data", died)
        self.made.append((process, died))
        return RunningEngine(engine=TransferringEngine(process, self.transfer), died=died)

    def kill(self) -> None:
        self.made[-1][1].set()


@asynccontextmanager
async def elsewhere(tmp_path: Path) -> AsyncIterator[tuple[Api, Elsewhere]]:
    """A service with its engine on another machine."""
    start = Elsewhere(tmp_path)
    options = {"store": (tmp_path / "store").as_uri(), "capture_every": 2}
    try:
        async with api(tmp_path / "data", start, **options) as app:
            yield app, start
    finally:
        for process, _ in start.made:
            await process.close()


def folders(tmp_path: Path) -> list[Path]:
    """Folders of checkpoints and states on the service's machine."""
    data = tmp_path / "data"
    return [*(data / "checkpoints").glob("*"), *(data / "journal").glob("*/*")]


async def sampled(app: Api, sampler: str) -> httpx.Response:
    body = {
        "sampling_session_id": sampler,
        "seq_id": 0,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]},
        "sampling_params": {"max_tokens": 3, "seed": 1},
        "num_samples": 1,
    }
    return await app.result((await app.post("asample", body)).json())


async def next_loss(app: Api, model: str, seq: int) -> float:
    promise = (await app.post("forward_backward", pass_body(model, seq))).json()
    return loss_in(await app.result(promise))


def test_everything_goes_through_the_store(tmp_path: Path) -> None:
    """Fails if a source is a folder of this machine, or if what the engine wrote is looked for here."""

    async def main() -> None:
        async with elsewhere(tmp_path) as (app, start):
            model = await app.model()
            session = model.partition(":")[0]
            await trained(app, model, 1, 3)
            saved = (await app.call("save_weights", {"model_id": model, "seq_id": 7, "path": "kept"}))["path"]
            body = {"model_id": model, "seq_id": 8, "path": "named"}
            named = (await app.call("save_weights_for_sampler", body))["path"]
            body = {"model_id": model, "seq_id": 9, "sampling_session_seq_id": 5}
            unnamed = (await app.call("save_weights_for_sampler", body))["sampling_session_id"]
            await until(lambda: all(each.ready for each in app.service.store.all(Checkpoint)))
            loss = await next_loss(app, model, 10)
            first = await sampled(app, unnamed)
            start.kill()
            assert await next_loss(app, model, 11) == loss, "restored from the object of its captured state"
            assert len(start.made) == 2
            other = await app.model(session, 1)
            await app.call("load_weights", {"model_id": other, "seq_id": 1, "path": saved, "optimizer": True})
            assert await next_loss(app, other, 2) == loss
            body = {"session_id": session, "sampling_session_seq_id": 0, "model_path": named, "base_model": "toy"}
            sampler = (await app.post("create_sampling_session", body)).json()["sampling_session_id"]
            assert (await sampled(app, sampler)).content == first.content
            assert (await sampled(app, unnamed)).status_code == 200
            copy = {"source_path": saved, "destination_project_id": "p"}
            assert (await app.post("copy_weights", copy)).status_code == 200
            assert not folders(tmp_path), "nothing here has read a file"
            [saved_checkpoint] = [each for each in app.service.store.all(Checkpoint) if each.path == saved]
            folder = await app.service.checkpoints.present(saved_checkpoint)
            assert {file.name for file in folder.iterdir()} >= {"adapter_config.json"}
            named_digests = {each.digest for each in app.service.store.all(Checkpoint)}
            named_digests |= {each.captured_digest for each in app.service.store.all(Model)}
            assert named_digests <= {each.id for each in app.service.store.all(StoredObject)} | {None}

    asyncio.run(main())


def test_imports_and_encrypted_weights_pass_through_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails without `bring`: the service reads both files, and an encrypted adapter is in the store in no other way."""

    def read_spec(folder: Path) -> LoraSpec:  # the fake engine's adapters have no target_modules
        assert (folder / CONFIG).is_file()
        return LoraSpec(rank=4, seed=0)

    monkeypatch.setattr("tinsmith.service.routes.imports.read_spec", read_spec)

    async def main() -> None:
        async with elsewhere(tmp_path) as (app, _):
            model = await app.model()
            await trained(app, model, 1)
            await app.call("save_weights", {"model_id": model, "seq_id": 3, "path": "kept"})
            loss = await next_loss(app, model, 4)
            [saved_checkpoint] = app.service.store.all(Checkpoint)
            archive = io.BytesIO()
            with tarfile.open(fileobj=archive, mode="w") as tar:
                folder = await app.service.checkpoints.present(saved_checkpoint)
                for name in (CONFIG, WEIGHTS):
                    tar.add(folder / name, name)
            path = "/api/v1/import_checkpoint?name=mine&base_model=toy"
            answer = await app.http.post(path, content=archive.getvalue())
            assert answer.status_code == 200, answer.text
            other = await app.model(model.partition(":")[0], 1)
            body = {"model_id": other, "seq_id": 1, "path": answer.json()["tinker_path"], "optimizer": False}
            await app.call("load_weights", body)
            assert await next_loss(app, other, 2) == loss
            reader = pyrage.x25519.Identity.generate()
            body = {
                "model_id": model,
                "seq_id": 5,
                "path": "secret",
                "age_encryption_recipients": [str(reader.to_public())],
            }
            await app.call("save_weights_external", body)
            [secret] = [each for each in app.service.store.all(Checkpoint) if each.name == "secret"]
            names = {file.name for file in (tmp_path / "store" / "objects" / str(secret.digest)).iterdir()}
            assert "adapter_model.safetensors" not in names
            assert any(name.endswith(".age") for name in names), names

    asyncio.run(main())


def test_interrupted_publication_leaves_an_orphan_to_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if an object is uploaded before it is noted."""
    publish = ObjectStore.publish

    def dies(self: ObjectStore, *args: Any) -> str:
        digest = publish(self, *args)
        raise EngineDied(f"after {digest}", from_outside=True)

    async def main() -> None:
        async with elsewhere(tmp_path) as (app, start):
            model = await app.model()
            await app.step(model, 1)
            with monkeypatch.context() as patch:
                patch.setattr(ObjectStore, "publish", dies)
                promise = (await app.post("save_weights", {"model_id": model, "seq_id": 2, "path": "kept"})).json()
                await until(lambda: len(list((tmp_path / "store" / "objects").glob("*"))) == 1)
                start.kill()
            assert "path" in (await app.result(promise)).json(), "the request is performed again"
            copies, later = app.service.object_copies, time.time() + 2 * UNNAMED_S
            [saved_checkpoint] = app.service.store.all(Checkpoint)
            await app.service.checkpoints.delete(saved_checkpoint)
            await app.call("unload_model", {"model_id": model, "type": "unload_model"})
            await until(lambda: app.service.store.find(Model, model).state == "ended")
            assert await copies.collect(later) >= 1
            assert not list((tmp_path / "store" / "objects").glob("*"))

    asyncio.run(main())


def test_versions_and_saves_wait_while_the_store_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a version is written twice, which an engine cannot do, or if a save fails."""
    monkeypatch.setattr(object_copies, "RETRY_S", 0.1)
    monkeypatch.setattr("tinsmith.service.training.background_writes.RETRY_S", 0.1)

    def fail(*_: object) -> None:
        raise StoreUnavailableError("The store is away.")

    async def main() -> None:
        async with elsewhere(tmp_path) as (app, _):
            model = await app.model()
            with monkeypatch.context() as patch:
                patch.setattr(ObjectStore, "publish", fail)
                body = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 0}
                sampler = (await app.call("save_weights_for_sampler", body))["sampling_session_id"]
                promise = (await app.post("save_weights", {"model_id": model, "seq_id": 2, "path": "kept"})).json()
                await asyncio.sleep(0.4)
                assert (await sampled(app, sampler)).status_code == 200, "from memory"
                [version] = app.service.store.all(Checkpoint)
                assert not version.ready
                monkeypatch.setattr(FakeEngine, "persist", fail)
            assert "path" in (await app.result(promise)).json()
            await until(lambda: all(each.ready for each in app.service.store.all(Checkpoint)))

    asyncio.run(main())
