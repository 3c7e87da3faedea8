"""Groups of real processes with gloo: against one engine, with a base model that is sharded, and killed."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from safetensors.torch import load_file

from tests.architectures import save_tiny
from tests.engine.data import pass_for
from tests.engine.sampling.helpers import sample_request
from tinsmith.engine.base import AdamParams, LoraSpec, Pass, PassResult
from tinsmith.engine.build import build
from tinsmith.engine.cluster.config import ClusterConfig
from tinsmith.engine.cluster.trainers.group import GroupEngine, start_group
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.processes.slots import LocalSlots, free_port
from tinsmith.errors import BadRequest, ConfigError, EngineDied, Unsupported

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("forked_programs")]
STEPS = 20
GROUP = "tinsmith.engine.cluster.trainers.group"


@asynccontextmanager
async def group_of(folder: Path, trainers: int = 2, **settings: Any) -> AsyncIterator[GroupEngine]:
    local = LocalSlots()
    config = EngineConfig(source=str(folder), dtype="float32", device="cpu", threads=1, pass_tokens=64)
    slots = await local.reserve(trainers, name="trainer")
    try:
        group = await start_group(slots, config, ClusterConfig(trainers=trainers, **settings), 1)
        yield group
        await group.close()
    finally:
        await local.close()


def test_port_that_another_program_took_is_replaced(
    tiny_llama: Path, wait: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a group is started once with the port that was free a moment ago."""

    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as other:
            ports = [other.getsockname()[1]]
            monkeypatch.setattr(GROUP + ".free_port", lambda host: ports.pop() if ports else free_port(host))
            async with group_of(tiny_llama) as engine:
                await engine.create("a", LoraSpec(rank=2, seed=1))
        assert ports == []

    wait(run())


def passes_of(step: int) -> list[Pass]:
    """Of two models; rows whose micro-batches cannot be shared out evenly, and one beyond recompute's limit."""
    return [
        pass_for("ppo", "a", seed=step, lengths=(9, 3, 200 if step % 5 == 0 else 30, 14, 7)),
        pass_for("cross_entropy", "b", seed=100 + step, lengths=(12,)),
        pass_for("cross_entropy", "a", seed=200 + step, lengths=(21, 5), forward_only=True),
    ]


async def trained(engine: Any, target: Path) -> tuple[list[PassResult], dict[str, Any]]:
    results: list[PassResult] = []
    for number, name in enumerate(("a", "b")):
        await engine.create(name, LoraSpec(rank=8, seed=number))
    for step in range(STEPS):
        results += await engine.run(passes_of(step))
        for name in ("a", "b"):
            await engine.step(name, AdamParams(learning_rate=1e-3))
    tensors: dict[str, Any] = {}
    for name in ("a", "b"):
        await engine.save(name, target / name, optimizer=True)
        for file in ("adapter_model", "optimizer"):
            saved = load_file(target / name / f"{file}.safetensors")
            tensors |= {f"{name}/{key}": tensor.double() for key, tensor in saved.items()}
    return results, tensors


@pytest.mark.parametrize("shard", [False, True])
def test_two_processes_train_as_one_engine_does(
    shard: bool, tiny_llama: Path, engine_of: Callable[..., Any], tmp_path: Path
):
    single = engine_of("llama", pass_tokens=64)

    async def both_trained() -> tuple[Any, Any]:
        expected = await trained(single, tmp_path / "single")
        async with group_of(tiny_llama, shard=shard) as group:
            bad = pass_for("ppo", "a", seed=2, lengths=(40, 41))
            bad.data[1].inputs["logprobs"][...] = -1e30
            actual = await trained(group, tmp_path / "group")
            assert isinstance((await group.run([bad]))[0], BadRequest)
            if shard:
                held, whole = group.card.weight_bytes, single.card.weight_bytes
                embeddings = 512 * 96 * 4
                assert held < embeddings + 0.6 * (whole - embeddings)
                with pytest.raises(Unsupported, match="vLLM"):
                    await group.sample(sample_request())
            else:
                assert (await group.sample(sample_request(max_tokens=3))).sequences
        return expected, actual

    (results, tensors), (group_results, group_tensors) = asyncio.run(both_trained())
    for expected, actual in zip(results, group_results, strict=True):
        for theirs, ours in zip(expected.logprobs, actual.logprobs, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=2e-4)
    for name, tensor in tensors.items():
        if not name.endswith("steps"):
            assert float((group_tensors[name] - tensor).norm()) <= 2e-5 * float(tensor.norm()), name


def test_sharded_base_rotates_each_row_by_its_length(tmp_path: Path, wait: Any):
    """Rows up to the original context and beyond it in one request; fails without longrope's install on the shards."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32, "factor": 8.0}
    rope |= {"short_factor": [1.0 + number / 10 for number in range(8)], "long_factor": [2.0**n for n in range(8)]}
    folder = save_tiny("llama", tmp_path / "model", rope_parameters=rope)
    request = pass_for("cross_entropy", "a", seed=1, lengths=(20, 32, 33, 90))
    settings: Any = {"dtype": "float32", "device": "cpu", "threads": 1, "pass_tokens": 64}
    single: Any = build(EngineConfig(source=str(folder), **settings))

    async def outcome(engine: Any) -> list[Any]:
        await engine.create("a", LoraSpec(rank=8, seed=0))
        await engine.run([request])
        await engine.step("a", AdamParams(learning_rate=1e-2))
        (result,) = await engine.run([request])
        return result.logprobs

    async def sharded() -> list[Any]:
        async with group_of(folder, shard=True) as group:
            assert (group.card.context_length, group.card.original_context) == (256, 32)
            return await outcome(group)

    expected, actual = wait(outcome(single)), wait(sharded())
    for theirs, ours in zip(expected, actual, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-4)


@pytest.mark.parametrize("rank", [0, 1])
def test_death_of_a_rank_ends_all(rank: int, tiny_llama: Path):
    async def kill() -> None:
        async with group_of(tiny_llama) as group:
            await group.create("a", LoraSpec(rank=4, seed=1))
            running = asyncio.create_task(group.run([pass_for("ppo", "a", lengths=(200,) * 40)]))
            await asyncio.sleep(0.1)
            os.kill(group.pids[rank], signal.SIGKILL)
            with pytest.raises(EngineDied, match="SIGKILL") as death:
                await asyncio.wait_for(running, 10)
            assert death.value.from_outside
            assert group.died.is_set()
            assert not [pid for pid in group.pids if psutil.pid_exists(pid)]

    asyncio.run(kill())


def test_error_of_loading_ends_all_ranks(tmp_path: Path):
    async def load() -> None:
        async with group_of(tmp_path / "nothing"):
            raise AssertionError("loaded")

    with pytest.raises(ConfigError, match="nothing"):
        asyncio.run(load())


def test_mixture_is_not_sharded(tmp_path: Path):
    async def load(folder: Path) -> None:
        async with group_of(folder, shard=True):
            raise AssertionError("loaded")

    with pytest.raises(Unsupported, match="mixture"):
        asyncio.run(load(save_tiny("mixtral", tmp_path)))
