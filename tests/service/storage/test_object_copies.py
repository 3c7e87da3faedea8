"""A service with an object store: folders here are copies, which may be lost, and objects end with their records."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from pathlib import Path

import pytest

from tests.service.support.inprocess import api, loss_in, pass_body, until
from tinsmith.engine.adapters.cache import UNUSED_S
from tinsmith.engine.adapters.store import Manifest, ObjectStore, StoreUnavailableError
from tinsmith.service.storage import object_copies
from tinsmith.service.storage.object_copies import UNNAMED_S, UPLOADS, ObjectCopies
from tinsmith.service.storage.records import Checkpoint, Model, StoredObject


def options(tmp_path: Path) -> dict[str, object]:
    return {"store": (tmp_path / "shared").as_uri(), "capture_every": 2}


def stored(tmp_path: Path) -> set[str]:
    return {folder.name for folder in (tmp_path / "shared" / "objects").iterdir()}


def test_service_goes_on_after_its_folders_are_lost(tmp_path: Path) -> None:
    """Fails without the call of `ensure` in `Checkpoints.present` or in `Journal.restore`."""

    async def main() -> None:
        async with api(tmp_path / "data", **options(tmp_path)) as app:
            model = await app.model()
            for seq in range(1, 9, 2):
                await app.post("forward_backward", pass_body(model, seq))
                await app.step(model, seq + 1)
            saved = (await app.call("save_weights", {"model_id": model, "seq_id": 9, "path": "kept"}))["path"]
            body = {"model_id": model, "seq_id": 10, "path": "named"}
            named = (await app.call("save_weights_for_sampler", body))["path"]
            promise = (await app.post("forward_backward", pass_body(model, 11))).json()
            loss = loss_in(await app.result(promise))
            checkpoints = app.service.store.all(Checkpoint)
            assert {each.digest for each in checkpoints} <= stored(tmp_path)
        for name in ("checkpoints", "journal"):
            shutil.rmtree(tmp_path / "data" / name)
        async with api(tmp_path / "data", **options(tmp_path)) as app:
            promise = (await app.post("forward_backward", pass_body(model, 12))).json()
            assert loss_in(await app.result(promise)) == loss, "restored from the object of its captured state"
            session = model.partition(":")[0]
            other = await app.model(session, 1)
            await app.call("load_weights", {"model_id": other, "seq_id": 1, "path": saved, "optimizer": True})
            promise = (await app.post("forward_backward", pass_body(other, 2))).json()
            assert loss_in(await app.result(promise)) == loss
            body = {"session_id": session, "sampling_session_seq_id": 0, "model_path": named, "base_model": "toy"}
            sampler = (await app.post("create_sampling_session", body)).json()["sampling_session_id"]
            body = {
                "sampling_session_id": sampler,
                "seq_id": 0,
                "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]},
                "sampling_params": {"max_tokens": 2},
                "num_samples": 1,
            }
            answer = await app.result((await app.post("asample", body)).json())
            assert answer.status_code == 200, answer.text

    asyncio.run(main())


def test_objects_end_with_their_records(tmp_path: Path) -> None:
    """Fails without the notes of objects, and without their age: a record may follow its publication."""

    async def main() -> None:
        async with api(tmp_path / "data", **options(tmp_path)) as app:
            model = await app.model()
            await app.call("save_weights", {"model_id": model, "seq_id": 1, "path": "kept"})
            await until(lambda: app.service.store.find(Model, model).captured_digest is not None)
            [checkpoint] = app.service.store.all(Checkpoint)
            copies, later = app.service.object_copies, time.time() + 2 * UNNAMED_S
            assert await copies.collect(later) == 0, "a checkpoint and a captured state name it"
            await app.service.checkpoints.delete(checkpoint)
            assert await copies.collect(later) == 0, "the captured state names it"
            await app.call("unload_model", {"model_id": model, "type": "unload_model"})
            await until(lambda: app.service.store.find(Model, model).state == "ended")
            assert await copies.collect(time.time()) == 0
            assert stored(tmp_path) == {checkpoint.digest}
            assert await copies.collect(later) == 1
            assert not stored(tmp_path)
            assert not app.service.store.all(StoredObject)

    asyncio.run(main())


def test_collection_reads_the_records_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the number of objects: reading all records for each takes seconds of the event loop."""

    async def main() -> None:
        async with api(tmp_path / "data", **options(tmp_path)) as app:
            notes = [StoredObject(id=f"{number:064}", created=0.0) for number in range(20)]
            await app.service.store.put(*notes)
            reads, all_records = [], app.service.store.all
            monkeypatch.setattr(app.service.store, "all", lambda kind: reads.append(kind) or all_records(kind))
            assert await app.service.object_copies.collect(time.time()) == 20
            assert reads.count(Checkpoint) == 1

    asyncio.run(main())


def test_object_of_a_link_is_new(tmp_path: Path) -> None:
    """A record will name it: it must not be deleted before."""

    async def main() -> None:
        async with api(tmp_path / "data", **options(tmp_path)) as app:
            copies, folder = app.service.object_copies, tmp_path / "folder"
            folder.mkdir()
            (folder / "file").write_text("text")
            digest = await copies.publish(folder, waits=True)
            assert digest is not None
            await app.service.store.put(StoredObject(id=digest, created=0.0))
            assert await copies.link(folder, digest, tmp_path / "other") == digest
            assert await copies.collect(time.time()) == 0
            assert stored(tmp_path) == {digest}

    asyncio.run(main())


def test_versions_are_uploaded_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if an upload waits for that of other content, or a version's write for the upload of another."""
    barrier, publish = threading.Barrier(2, timeout=60), ObjectStore.publish

    def meet(self: ObjectStore, folder: Path, manifest: Manifest | None = None) -> str:
        barrier.wait()
        return publish(self, folder, manifest)

    async def main() -> None:
        async with api(tmp_path / "data", **options(tmp_path)) as app:
            models = [await app.model(seed=seed) for seed in (1, 2)]
            monkeypatch.setattr(ObjectStore, "publish", meet)
            for model in models:
                body = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 0}
                await app.call("save_weights_for_sampler", body)
            await until(lambda: all(each.ready for each in app.service.store.all(Checkpoint)))
            assert len(stored(tmp_path)) == 2

    asyncio.run(main())


def test_few_uploads_run_at_once_and_each_content_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails without the limit, which keeps memory and connections small, or without the lock of a digest."""
    running: list[str] = []
    most, objects = [0], ObjectStore((tmp_path / "shared").as_uri())
    publish = ObjectStore.publish

    def count(self: ObjectStore, folder: Path, manifest: Manifest | None = None) -> str:
        digest = Manifest.of(folder).digest
        assert digest not in running
        running.append(digest)
        most.append(len(running))
        time.sleep(0.05)
        running.remove(digest)
        return publish(self, folder, manifest)

    async def main() -> None:
        async with api(tmp_path / "data", **options(tmp_path)) as app:
            monkeypatch.setattr(ObjectStore, "publish", count)
            folders = [tmp_path / str(number) for number in range(3 * UPLOADS)]
            for number, folder in enumerate(folders):
                folder.mkdir()
                (folder / "file").write_text(str(number // 2))
            copies = ObjectCopies(app.service.store, objects)
            digests = await asyncio.gather(*(copies.publish(folder, waits=True) for folder in folders))
            assert len(set(digests)) == len(folders) // 2
        assert max(most) == UPLOADS

    asyncio.run(main())


def test_cache_keeps_to_its_size(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path / "data", **options(tmp_path), store_cache=1) as app:
            model = await app.model()
            await app.call("save_weights", {"model_id": model, "seq_id": 1, "path": "kept"})
            [checkpoint] = app.service.store.all(Checkpoint)
            folder = app.service.checkpoints.folder(checkpoint.id)
            await app.service.object_copies.trim(time.time())
            assert folder.is_dir(), "it was used lately"
            await app.service.object_copies.trim(time.time() + 2 * UNUSED_S)
            assert not folder.exists()
            assert (await app.service.checkpoints.present(checkpoint)).is_dir()

    asyncio.run(main())


def test_outage_of_the_store_delays_saves_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a capture waits for the store, or if a save fails without it."""
    monkeypatch.setattr(object_copies, "RETRY_S", 0.2)

    async def main() -> None:
        async with api(tmp_path / "data", **options(tmp_path)) as app:
            model = await app.model()
            with monkeypatch.context() as patch:

                def fail(*_: object) -> None:
                    raise StoreUnavailableError("The store is away.")

                patch.setattr(ObjectStore, "exists", fail)
                for seq in range(1, 9):
                    await app.step(model, seq)
                assert app.service.store.find(Model, model).captured is None
                promise = (await app.post("save_weights", {"model_id": model, "seq_id": 9, "path": "kept"})).json()
                await asyncio.sleep(0.5)
                assert not app.service.store.all(Checkpoint)
            assert "path" in (await app.result(promise)).json()
            [checkpoint] = app.service.store.all(Checkpoint)
            assert checkpoint.digest in stored(tmp_path)

    asyncio.run(main())
