"""A service whose base model is trained and sampled by several processes, which are killed in the middle."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.engine.vllm import stub as vllm_stub
from tests.service.support.inprocess import Api, api, loss_in, pass_body
from tinsmith.engine.cluster.config import ClusterConfig
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.processes.slots import LocalSlots
from tinsmith.engine_options import VllmConfig
from tinsmith.errors import EngineError
from tinsmith.service.engines.clusters import ClusterFactory, connect_slots, engine_factory
from tinsmith.service.engines.host import start_engine
from tinsmith.service.wire.protobuf import pb


async def processes(app: Api) -> list[dict]:
    answer = (await app.http.get("/api/v1/admin/processes")).json()
    return answer["base_models"][0]["processes"]


async def sample(app: Api, model: str, seq: int, tokens: int = 3) -> list[int]:
    body = {"model_id": model, "seq_id": seq, "sampling_session_seq_id": seq}
    path = (await app.call("save_weights_for_sampler", body))["sampling_session_id"]
    prompt = {"chunks": [{"tokens": [5, 6]}]}
    body = {"sampling_session_id": path, "seq_id": 0, "prompt": prompt}
    body["sampling_params"] = {"max_tokens": tokens, "seed": 3, "temperature": 1.0}
    promise = (await app.post("asample", body)).json()
    answer = pb.SampleResponse()
    answer.ParseFromString((await app.result(promise)).content)
    return np.frombuffer(answer.sequences[0].tokens, "<i4").tolist()


async def train(app: Api, model: str, first: int) -> float:
    """Two steps; returns the loss before the second."""
    for seq in (first, first + 2):
        promise = (await app.send("POST", "/api/v1/forward_backward", pass_body(model, seq))).json()
        loss = loss_in(await app.result(promise))
        await app.step(model, seq + 1)
    return loss


def test_training_and_sampling_survive_the_death_of_each_process(tmp_path: Path) -> None:
    async def quiet() -> tuple[list[float], list[list[int]]]:
        async with api(tmp_path / "quiet") as app:
            model = await app.model(seed=1)
            first = await train(app, model, 1), await sample(app, model, 5)
            second = await train(app, model, 6), await sample(app, model, 10)
        return tuple(zip(first, second, strict=True))

    async def killed() -> tuple[list[float], list[list[int]]]:
        factory = ClusterFactory(ClusterConfig(samplers=2), tmp_path / "killed")
        async with api(tmp_path / "killed", factory) as app:
            before = await processes(app)
            assert [each["name"] for each in before if each["is_up"]] == ["trainer-0", "sampler-0", "sampler-1"]
            pids = [each["pid"] for each in before]
            assert len({*pids, os.getpid()}) == 4
            model = await app.model(seed=1)
            first = await train(app, model, 1), await sample(app, model, 5)
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            second = await train(app, model, 6), await sample(app, model, 10)
            after = await processes(app)
            assert after[0]["generation"] == 2
            assert not {each["pid"] for each in after} & set(pids)
        assert not [each for each in after if psutil.pid_exists(each["pid"])]
        return tuple(zip(first, second, strict=True))

    assert asyncio.run(killed()) == asyncio.run(quiet())


def test_vllm_that_does_not_start_leaves_no_process(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {vllm_stub.__file__} "$@"\n')
    python.chmod(0o755)
    vllm = VllmConfig(python=python, args=("--fail",))

    before = set(psutil.Process().children())

    async def run() -> None:
        factory = ClusterFactory(ClusterConfig(), tmp_path)
        with pytest.raises(EngineError, match="no memory for the cache"):
            await factory(EngineConfig(source="toy", kind="fake", sampler="vllm", vllm=vllm))
        assert set(psutil.Process().children()) <= before
        assert isinstance(factory._slots, LocalSlots)
        assert factory._slots._reserved == []

    asyncio.run(run())


def test_one_process_needs_no_cluster() -> None:
    assert engine_factory(ClusterConfig(), Path()) is start_engine
    assert isinstance(engine_factory(ClusterConfig(), Path(), has_vllm=True), ClusterFactory)
    assert isinstance(engine_factory(ClusterConfig(samplers=1), Path()), ClusterFactory)


def test_tls_is_a_setting() -> None:
    """Fails if the setting does not reach the slots."""

    async def identities(*, tls: bool) -> list[object]:
        slots = await connect_slots(ClusterConfig(tls=tls))
        return [slot._identity for slot in await slots.reserve(2, name="sampler")]

    first, second = asyncio.run(identities(tls=True))
    assert first is second is not None
    assert asyncio.run(identities(tls=False)) == [None, None]
