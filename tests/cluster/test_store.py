"""A cluster whose processes do not see the data folder: adapters go through the object store, with the same bits.

Each process runs in a mount namespace in which the data folder is empty.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.conftest import RayCluster
from tests.cluster.hidden import blind, blind_python, can_hide
from tests.service.support.inprocess import Api, api, trained
from tinsmith.engine.adapters.access import fault_of_store
from tinsmith.engine.adapters.store import ObjectStore
from tinsmith.engine.cluster.config import ClusterConfig
from tinsmith.engine.processes.slots import LocalSlot
from tinsmith.service.engines.clusters import ClusterFactory, engine_factory
from tinsmith.service.storage.records import Checkpoint, Model

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

STEPS = 6
Outcome = tuple[list[float], list[Any], dict[str, bytes]]


@pytest.fixture
def hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder that the processes of slots do not see."""
    if not can_hide():
        pytest.skip("needs user namespaces (unshare)")
    data = tmp_path / "data"
    data.mkdir()
    monkeypatch.setattr(sys, "executable", blind_python(tmp_path, data).path)

    monkeypatch.setattr(LocalSlot, "run", blind(LocalSlot.run))
    return data


@pytest.fixture(scope="module")
def seen(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The outcome where all processes see the data folder."""
    data = tmp_path_factory.mktemp("seen")
    return asyncio.run(_run(data, tiny_llama, ClusterConfig(trainers=2, samplers=1), store=None))


@pytest.mark.parametrize("samplers", [0, 2])
def test_bits_are_those_of_a_shared_folder(
    samplers: int, seen: Outcome, hidden: Path, tiny_llama: Path, tmp_path: Path
) -> None:
    """Fails if a process reads or writes a path of the service, or if a load, a replay or a version lacks an object."""
    cluster = ClusterConfig(trainers=2, samplers=samplers, cache=tmp_path / "cache")
    url = (tmp_path / "store").as_uri()
    assert asyncio.run(_run(hidden, tiny_llama, cluster, store=url)) == seen
    assert not list((tmp_path / "cache").glob(".process-*/*.writing"))


def test_sampler_moves_to_a_machine_that_does_not_see_the_folder(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a sampler that is started again reads versions as before, or if the versions before are lost."""
    if not can_hide():
        pytest.skip("needs user namespaces (unshare)")
    data = tmp_path / "data"
    data.mkdir()
    cluster = ClusterConfig(samplers=1, cache=tmp_path / "cache")
    options = _options(tiny_llama, cluster, (tmp_path / "store").as_uri())
    start = engine_factory(cluster, data, options["store"], LIMIT)
    assert isinstance(start, ClusterFactory)

    async def main() -> None:
        async with api(data, start, **options) as app:
            app.http.timeout = 300
            app.result = partial(_result, app)  # type: ignore[method-assign]
            model_id = await app.model(seed=3)
            await trained(app, model_id, 1, 2)
            body = {"model_id": model_id, "seq_id": 5, "path": "before"}
            before = {"model_path": (await app.call("save_weights_for_sampler", body))["path"]}
            expected = await _sample(app, before, model_id, 0)
            [model] = start._models.values()
            [slot] = model._sampler_slots
            assert isinstance(slot, LocalSlot)
            assert slot.process is not None
            slot.machine = "elsewhere"
            monkeypatch.setattr(LocalSlot, "run", blind(LocalSlot.run))
            monkeypatch.setattr(sys, "executable", blind_python(tmp_path, data).path)
            os.kill(slot.process.pid, signal.SIGKILL)
            await slot.process.died.wait()
            assert await _sample(app, before, model_id, 1) == expected
            assert start.transfer.through_store
            await trained(app, model_id, 6, 1)
            body = {"model_id": model_id, "seq_id": 8, "path": "after"}
            after = {"model_path": (await app.call("save_weights_for_sampler", body))["path"]}
            assert await _sample(app, after, model_id, 2) != expected

    asyncio.run(main())


def test_bits_through_s3(seen: Outcome, s3_server: object, hidden: Path, tiny_llama: Path, tmp_path: Path) -> None:
    cluster = ClusterConfig(trainers=2, samplers=1, cache=tmp_path / "cache")
    assert asyncio.run(_run(hidden, tiny_llama, cluster, store="s3://bucket/cluster")) == seen


def test_bits_on_ray(
    seen: Outcome, ray_cluster: RayCluster, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a node agent does not pass the store on. Its machines are this one, set to see nothing."""
    from tinsmith.engine.processes.ray_slots import RaySlot

    monkeypatch.setattr(RaySlot, "run", blind(RaySlot.run))
    cluster = ClusterConfig(address=ray_cluster.address, trainers=2, samplers=1, cache=tmp_path / "cache")
    url = (tmp_path / "store").as_uri()
    assert asyncio.run(_run(tmp_path / "data", tiny_llama, cluster, store=url)) == seen


def test_machines_without_the_store_are_refused(
    hidden: Path, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = LocalSlot.run

    async def run_without_store(self: LocalSlot, function: Any, *args: Any) -> Any:
        if function is fault_of_store:
            return "The object store could not be written: no credentials"
        return await run(self, function, *args)

    monkeypatch.setattr(LocalSlot, "run", run_without_store)
    options = _options(tiny_llama, ClusterConfig(trainers=2), (tmp_path / "store").as_uri())
    start = engine_factory(options["cluster"], hidden, options["store"], LIMIT)

    async def main() -> None:
        async with api(hidden, start, **options) as app:
            answer = await app.http.get("/api/v1/healthz")
            assert answer.status_code != 200

    asyncio.run(main())


LIMIT = 1 << 30


def _options(model: Path, cluster: ClusterConfig, store: str | None) -> dict[str, Any]:
    return {
        "engine": "torch",
        "models": (f"toy={model}",),
        "dtype": "float32",
        "device": "cpu",
        "threads": 1,
        "cluster": cluster,
        "deterministic": True,
        "capture_every": 4,
        "hold_s": 44.0,
        "store": store,
    }


async def _run(data: Path, model: Path, cluster: ClusterConfig, store: str | None) -> Outcome:
    """Train, save, load, sample, lose the trainers, go on: losses, samples, files of the last checkpoint."""
    start = engine_factory(cluster, data, store, LIMIT)
    assert isinstance(start, ClusterFactory)
    async with api(data, start, **_options(model, cluster, store)) as app:
        app.http.timeout = 300
        app.result = partial(_result, app)  # type: ignore[method-assign]
        answer = await app.http.get("/api/v1/healthz")
        assert answer.status_code == 200, answer.text
        assert start.transfer.through_store == (store is not None)
        model_id = await app.model(seed=3)
        losses = await trained(app, model_id, 1, STEPS)
        saved = (await app.call("save_weights", {"model_id": model_id, "seq_id": 13, "path": "kept"}))["path"]
        named = (await app.call("save_weights_for_sampler", {"model_id": model_id, "seq_id": 14, "path": "n"}))["path"]
        samples = [await _sample(app, {"model_path": named}, model_id, 0)]
        unnamed = {"model_id": model_id, "seq_id": 15, "sampling_session_seq_id": 1}
        sampler = (await app.call("save_weights_for_sampler", unnamed))["sampling_session_id"]
        samples.append(await _sample_of(app, sampler))
        losses += await trained(app, model_id, 16, 2)
        os.kill(_trainers(start)[0].pid, signal.SIGKILL)
        losses += await trained(app, model_id, 20, 2)
        session = model_id.partition(":")[0]
        other = await app.model(session, 1)
        await app.call("load_weights", {"model_id": other, "seq_id": 1, "path": saved, "optimizer": True})
        losses += await trained(app, other, 2, 2)
        samples.append(await _sample(app, {"model_path": named}, model_id, 2))
        await app.call("save_weights", {"model_id": model_id, "seq_id": 24, "path": "end"})
        await app.call("save_weights", {"model_id": other, "seq_id": 6, "path": "end"})
        ends = [each for each in app.service.store.all(Checkpoint) if each.name == "end"]
        if store is not None:
            assert not list((data / "checkpoints").iterdir()), "nothing here has read a checkpoint"
            digests = {each.digest for each in app.service.store.all(Checkpoint)}
            digests |= {each.captured_digest for each in app.service.store.all(Model)}
            assert all(ObjectStore(store).exists(str(digest)) for digest in digests)
        files = {}
        for number, each in enumerate(sorted(ends, key=lambda each: each.run)):
            folder = await app.service.checkpoints.present(each)
            files |= {f"{number}/{file.name}": file.read_bytes() for file in folder.glob("*.safetensors")}
        return losses, samples, files


async def _result(app: Api, promise: dict[str, Any]) -> httpx.Response:
    """The result of a request, however long its engine takes to be started again."""
    while (answer := await app.post("retrieve_future", {"request_id": promise["request_id"]})).status_code == 408:
        pass
    return answer


async def _sample(app: Any, source: dict[str, str], model_id: str, number: int) -> Any:
    session = model_id.partition(":")[0]
    body = {"session_id": session, "sampling_session_seq_id": number, "base_model": "toy", **source}
    return await _sample_of(app, (await app.post("create_sampling_session", body)).json()["sampling_session_id"])


async def _sample_of(app: Any, sampler: str) -> Any:
    body = {
        "sampling_session_id": sampler,
        "seq_id": 0,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]},
        "sampling_params": {"max_tokens": 6, "seed": 3},
        "num_samples": 2,
    }
    answer = await app.result((await app.post("asample", body)).json())
    assert answer.status_code == 200, answer.text
    return answer.content


def _trainers(start: ClusterFactory) -> list[Any]:
    [model] = start._models.values()
    return [each for each in model.status() if each.role == "trainer"]
