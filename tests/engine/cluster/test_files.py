"""Adapter files of processes that do not see the data folder: the cache of a machine, and an engine over it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.cluster.pools import CONFIG, in_loop
from tinsmith.engine.adapters.access import fault_of_store
from tinsmith.engine.adapters.cache import (
    UNUSED_S,
    ObjectCache,
    ObjectSettings,
)
from tinsmith.engine.adapters.cached_engine import CachedEngine
from tinsmith.engine.adapters.store import Manifest, MissingObjectError, ObjectStore, StoreUnavailableError
from tinsmith.engine.adapters.transfer import FolderTransfer
from tinsmith.engine.base import Datum, LoraSpec, Pass, SampleRequest, SavedObject
from tinsmith.engine.cluster.cluster import ModelCluster
from tinsmith.engine.cluster.config import ClusterConfig
from tinsmith.engine.fake.engine import FakeEngine
from tinsmith.engine.processes.slots import LocalSlot, LocalSlots, read_file
from tinsmith.errors import ConfigError, EngineError, Gone

LARGE = 1 << 30
Caches = Callable[..., ObjectCache]


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return ObjectStore((tmp_path / "store").as_uri())


@pytest.fixture
def cache_in(store: ObjectStore) -> Iterator[Callable[..., ObjectCache]]:
    """Makes caches of processes, which end with the test."""
    caches: list[ObjectCache] = []

    def make(folder: Path, limit: int = LARGE) -> ObjectCache:
        caches.append(ObjectCache(store, folder, limit))
        return caches[-1]

    yield make
    for cache in caches:
        cache.close()


def published(store: ObjectStore, folder: Path, content: str) -> str:
    folder.mkdir()
    (folder / "file").write_text(content)
    return store.publish(folder)


def age(folder: Path) -> None:
    """Make a folder unused for longer than the cache waits."""
    then = time.time() - 2 * UNUSED_S
    os.utime(folder, (then, then))


def names(root: Path) -> set[str]:
    return {entry.name for entry in root.iterdir() if not entry.name.startswith(".")}


def test_processes_of_a_machine_fetch_an_object_once(
    store: ObjectStore, cache_in: Caches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = published(store, tmp_path / "a", "weights")
    first, second = (cache_in(tmp_path / "cache") for _ in range(2))
    assert (first.ensure(digest) / "file").read_text() == "weights"
    monkeypatch.setattr(ObjectStore, "fetch", None)
    assert second.ensure(digest) == first.folder(digest)
    age(first.folder(digest))
    assert (second.ensure(digest) / "file").read_text() == "weights"


def test_cache_keeps_to_its_size_and_spares_what_is_in_use(
    store: ObjectStore, cache_in: Caches, tmp_path: Path
) -> None:
    """Fails if `trim` deletes by size alone, or does not look again at a folder under its lock."""
    digests = [published(store, tmp_path / name, name * 100) for name in "abc"]
    cache = cache_in(tmp_path / "cache", 250)
    folders = [cache.ensure(digest) for digest in digests]
    assert names(tmp_path / "cache") == set(digests), "all were used lately"
    for folder in folders[:2]:
        age(folder)
    cache.ensure(digests[0])  # used again
    assert names(tmp_path / "cache") == {digests[0], digests[2]}
    assert (cache.ensure(digests[1]) / "file").read_text() == "b" * 100, "it is fetched again"


def test_what_an_ended_process_left_is_deleted(cache_in: Caches, tmp_path: Path) -> None:
    """Fails without the locks that living processes hold."""
    living, ended = (cache_in(tmp_path / "cache") for _ in range(2))
    for cache in (living, ended):
        cache.new_folder().mkdir()
    ended._alive.close()  # the system does this at the end of a process
    cache_in(tmp_path / "cache").trim()
    assert living._own.is_dir()
    assert not ended._own.exists()


def test_a_damaged_object_is_not_taken(store: ObjectStore, cache_in: Caches, tmp_path: Path) -> None:
    digest = published(store, tmp_path / "a", "weights")
    (tmp_path / "store" / "objects" / digest / "file").write_text("wEights")
    cache = cache_in(tmp_path / "cache")
    with pytest.raises(MissingObjectError, match="damaged"):
        cache.ensure(digest)
    assert names(tmp_path / "cache") == set()


@in_loop
async def test_engines_of_two_machines_exchange_objects(store: ObjectStore, cache_in: Caches, tmp_path: Path) -> None:
    trainer, sampler = (CachedEngine(FakeEngine(CONFIG), cache_in(tmp_path / name)) for name in "ab")
    await trainer.create("m", LoraSpec(rank=2, seed=1))
    await trainer.run([_pass("m")])
    await trainer.step("m", _adam())
    state = await trainer.save_object("m", optimizer=True)
    await trainer.capture("m", "v")
    version = await trainer.persist_object("v")
    request = SampleRequest(request_id="r", prompt=np.array([5, 6], np.int32), version="v", max_tokens=5, seed=3)
    expected = await trainer.sample(request)
    with pytest.raises(MissingObjectError):
        await sampler.attach("v", SavedObject(version.digest))
    for digest in (state.digest, version.digest):
        await trainer.upload(digest)
    await sampler.attach("v", SavedObject(version.digest))
    await sampler.load("copy", SavedObject(state.digest), optimizer=True)
    again = await sampler.save_object("copy", optimizer=True)
    assert again.digest == state.digest, "weights and moments are the same bits"
    assert (await sampler.sample(request)).sequences[0].tokens.tolist() == expected.sequences[0].tokens.tolist()
    piece = await trainer.read_file(version.digest, version.names[0], 1, 5)
    assert piece == (tmp_path / "a" / version.digest / version.names[0]).read_bytes()[1:6]


@in_loop
async def test_a_version_is_fetched_again_before_its_next_sample(
    store: ObjectStore, cache_in: Caches, tmp_path: Path
) -> None:
    """Fails if only `attach` looks for the object: an engine reads its files when it likes."""
    writer = CachedEngine(FakeEngine(CONFIG), cache_in(tmp_path / "a"))
    await writer.create("m", LoraSpec(rank=2, seed=1))
    written = await writer.save_object("m", optimizer=False)
    await writer.upload(written.digest)
    sampler = CachedEngine(FakeEngine(CONFIG), cache_in(tmp_path / "b"))
    await sampler.attach("v", SavedObject(written.digest))
    folder = tmp_path / "b" / written.digest
    folder.rename(tmp_path / "gone")
    request = SampleRequest(request_id="r", prompt=np.array([5], np.int32), version="v", max_tokens=2)
    await sampler.sample(request)
    assert folder.is_dir()


@in_loop
async def test_a_load_waits_while_the_store_is_away(
    store: ObjectStore, cache_in: Caches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if the error of a store that does not answer reaches a replay."""
    monkeypatch.setattr("tinsmith.engine.adapters.cached_engine.RETRY_S", 0.01)
    engines = [CachedEngine(FakeEngine(CONFIG), cache_in(tmp_path / name)) for name in "ab"]
    await engines[0].create("m", LoraSpec(rank=2, seed=1))
    written = await engines[0].save_object("m", optimizer=True)
    await engines[0].upload(written.digest)
    fetch, attempts = ObjectStore.fetch, []

    def fails_twice(self: ObjectStore, digest: str, to: Path) -> int:
        attempts.append(digest)
        if len(attempts) < 3:
            raise StoreUnavailableError("The store is away.")
        return fetch(self, digest, to)

    monkeypatch.setattr(ObjectStore, "fetch", fails_twice)
    await engines[1].load("m", SavedObject(written.digest), optimizer=True)
    assert len(attempts) == 3


class Machine(LocalSlot):
    """A slot of a machine that may see the data folder, and reach the store."""

    def __init__(self, name: str, *, sees: bool, reason: str = "") -> None:
        super().__init__(name, ())
        self.machine, self._sees, self._reason = name, sees, reason

    async def run(self, function: Any, *args: Any, **options: Any) -> Any:
        if function is read_file:
            return read_file(*args) if self._sees else None
        assert function is fault_of_store
        return self._reason


@in_loop
async def test_objects_are_used_where_a_machine_sees_no_folder(tmp_path: Path) -> None:
    settings = ObjectSettings(url=(tmp_path / "store").as_uri(), cache_bytes=LARGE)
    near, far = Machine("near", sees=True), Machine("far", sees=False)
    with pytest.raises(ConfigError, match="far does not see the folder"):
        await FolderTransfer().choose([near, far], tmp_path)
    with pytest.raises(ConfigError, match="off cannot use the store: no credentials"):
        await FolderTransfer(settings).choose([near, Machine("off", sees=False, reason="no credentials")], tmp_path)
    transfer = FolderTransfer(settings)
    await transfer.choose([near], tmp_path)
    assert not transfer.through_store
    await transfer.choose([near, far], tmp_path)
    assert transfer.through_store
    await transfer.choose([near], tmp_path)
    assert transfer.through_store, "what was written since is in no folder"


@in_loop
async def test_trainer_that_has_moved_is_checked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if only the first start checks which machines see the folder."""
    settings = ObjectSettings(url=(tmp_path / "store").as_uri(), cache_bytes=LARGE)
    transfer = FolderTransfer(settings)
    cluster = ModelCluster(CONFIG, ClusterConfig(), LocalSlots(), tmp_path, transfer)

    async def start_engine(*_: object, **__: object) -> None:
        assert transfer.through_store == (cluster.generation > 1)

    monkeypatch.setattr("tinsmith.engine.cluster.cluster.start_engine", start_engine)
    for cluster.generation in (1, 2):
        cluster._trainer_slots = [Machine("trainer-0", sees=False)]
        await cluster._start_trainer()


@in_loop
async def test_sampler_that_has_moved_is_checked_again(tmp_path: Path) -> None:
    """Fails if only the first start of a sampler checks its machine, or if others need not reach the store then."""
    settings = ObjectSettings(url=(tmp_path / "store").as_uri(), cache_bytes=LARGE)
    transfer = FolderTransfer(settings)
    cluster = ModelCluster(CONFIG, ClusterConfig(samplers=1), LocalSlots(), tmp_path, transfer)
    trainer, sampler = Machine("near", sees=True), Machine("near", sees=True)
    cluster._trainer_slots, cluster._sampler_slots = [trainer], [sampler]
    started = []

    async def launch() -> Any:
        started.append(transfer.through_store)

    await cluster._checked(sampler, launch)()
    sampler.machine, sampler._sees, trainer._reason = "far", False, "no credentials"
    with pytest.raises(ConfigError, match="near cannot use the store: no credentials"):
        await cluster._checked(sampler, launch)()
    trainer._reason = ""
    await cluster._checked(sampler, launch)()
    assert started == [False, True]


@in_loop
async def test_moved_process_without_a_store_is_refused_by_name(tmp_path: Path) -> None:
    """Fails if a machine is checked at the first start alone: saves there would fail one by one."""
    cluster = ModelCluster(CONFIG, ClusterConfig(), LocalSlots(), tmp_path)
    cluster._trainer_slots = [Machine("trainer-0", sees=False)]
    cluster.generation = 2
    with pytest.raises(ConfigError, match=r"trainer-0 does not see the folder .* or a --store"):
        await cluster._start_trainer()


@in_loop
async def test_errors_concern_their_request_and_name_no_folder(
    store: ObjectStore, cache_in: Caches, tmp_path: Path
) -> None:
    engine = CachedEngine(FakeEngine(CONFIG), cache_in(tmp_path / "a"))
    await engine.create("m", LoraSpec(rank=2, seed=1))
    failed, passed = await engine.run([_pass("m", start=SavedObject("00" * 16)), _pass("m")])
    assert isinstance(failed, EngineError)
    assert not isinstance(passed, Exception)
    other = SavedObject(published(store, tmp_path / "x", "not an adapter"))
    with pytest.raises(EngineError) as error:
        await engine.load("m", other, optimizer=False)
    assert str(tmp_path) not in error.value.message


@in_loop
async def test_an_object_that_left_the_cache_cannot_be_stored(
    store: ObjectStore, cache_in: Caches, tmp_path: Path
) -> None:
    engine = CachedEngine(FakeEngine(CONFIG), cache_in(tmp_path / "a"))
    await engine.create("m", LoraSpec(rank=2, seed=1))
    written = await engine.save_object("m", optimizer=False)
    (tmp_path / "a" / written.digest).rename(tmp_path / "gone")
    with pytest.raises(Gone, match="cache of its machine"):
        await engine.upload(written.digest)
    assert not store.exists(written.digest)
    assert Manifest.of(tmp_path / "gone").digest == written.digest


def _pass(model: str, **options: Any) -> Pass:
    datum = Datum(tokens=np.array([5, 6, 7], np.int32), targets=np.array([6, 7, 8]), inputs=_weights())
    return Pass(model_id=model, data=(datum,), loss_fn="cross_entropy", **options)


def _weights() -> dict[str, np.ndarray]:
    return {"weights": np.ones(3, np.float32)}


def _adam() -> Any:
    from tinsmith.engine.base import AdamParams

    return AdamParams(learning_rate=0.01)
