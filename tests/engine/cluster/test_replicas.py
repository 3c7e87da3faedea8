"""Sampler replicas in processes of their own: the same answers as one engine, and kill -9 while they sample."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.engine.cluster.pools import in_loop
from tests.engine.vllm import stub as vllm_stub
from tinsmith.engine.base import LoraSpec, SampleRequest, SampleResult
from tinsmith.engine.build import build
from tinsmith.engine.cluster.cluster import ClusterEngine, ModelCluster
from tinsmith.engine.cluster.config import ClusterConfig
from tinsmith.engine.cluster.launches import torch_in_slot
from tinsmith.engine.cluster.pool import SamplerPool
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.processes.slots import LocalSlots
from tinsmith.engine_options import VllmConfig
from tinsmith.errors import Gone, Unsupported

pytestmark = pytest.mark.cluster


def _requests(version: str | None, tokens: int) -> list[SampleRequest]:
    """Four groups of three samples of the same prompt."""
    return [
        SampleRequest(
            request_id=f"{version}-{number}",
            prompt=np.full(70, 5 + number // 3, np.int32),
            version=version,
            num_samples=2,
            max_tokens=tokens,
            seed=number,
            stop_tokens=(),
        )
        for number in range(12)
    ]


def _assert_same(left: Sequence[SampleResult], right: Sequence[SampleResult]) -> None:
    for result, expected in zip(left, right, strict=True):
        for sequence, other in zip(result.sequences, expected.sequences, strict=True):
            np.testing.assert_array_equal(sequence.tokens, other.tokens)
            np.testing.assert_allclose(sequence.logprobs, other.logprobs, atol=2e-5)


@in_loop
async def test_replicas_answer_as_one_engine_also_while_one_is_killed(tiny_llama: Path, tmp_path: Path) -> None:
    config = EngineConfig(source=str(tiny_llama), dtype="float32", device="cpu", threads=1)
    trainer = build(config)
    await trainer.create("m", LoraSpec(rank=4, seed=1))
    local = LocalSlots()
    slots = await local.reserve(2, name="sampler")
    pool = await SamplerPool.start([torch_in_slot(slot, config) for slot in slots], trainer=trainer)
    try:
        await pool.capture("m", "v")
        await pool.persist("v", tmp_path / "v")
        for version in (None, "v"):
            requests = _requests(version, 8)
            results = await asyncio.gather(*map(pool.sample, requests))
            _assert_same(results, [await trainer.sample(request) for request in requests])
        assert all(each.versions for each in pool.status())
        requests = _requests("v", 60)
        running = [asyncio.create_task(pool.sample(request)) for request in requests]
        await asyncio.sleep(0.05)
        all_up = asyncio.Event()
        pool.on_change = lambda: all_up.set() if pool.living == 2 else all_up.clear()
        victim = next(each for each in pool.status() if each.requests)
        os.kill(victim.pid, signal.SIGKILL)
        results = await asyncio.gather(*running)
        _assert_same(results, [await trainer.sample(request) for request in requests])
        assert pool.counts.moved > 0
        await all_up.wait()
        assert sorted(each.starts for each in pool.status()) == [1, 2]
        assert victim.pid not in [each.pid for each in pool.status()]
    finally:
        await pool.close()
        await local.close()


@asynccontextmanager
async def _vllm_cluster(tiny_llama: Path, folder: Path) -> AsyncIterator[tuple[ClusterEngine, SamplerPool]]:
    """A trainer with version "v" of its model "m", and two stubs of vLLM."""
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {vllm_stub.__file__} "$@"\n')
    python.chmod(0o755)
    args = ("--record", str(folder / "record"), "--faults", str(folder / "faults"))
    settings = VllmConfig(python=python, rank=8, args=args)
    config = EngineConfig(
        source=str(tiny_llama), dtype="float32", device="cpu", threads=1, sampler="vllm", vllm=settings
    )
    cluster = ModelCluster(config, ClusterConfig(samplers=2), LocalSlots(), folder)
    engine = await cluster.start()
    assert cluster.pool is not None
    try:
        await engine.create("m", LoraSpec(rank=4, seed=1))
        await engine.capture("m", "v")
        await engine.persist("v", folder / "v")
        yield engine, cluster.pool
    finally:
        await engine.close()
        await cluster.close()


_REQUEST = SampleRequest(request_id="r", prompt=np.array([10, 20], np.int32), version="v", max_tokens=3, stop_tokens=())


@in_loop
async def test_vllm_replicas_load_versions_and_end_with_their_server(tiny_llama: Path, tmp_path: Path) -> None:
    async with _vllm_cluster(tiny_llama, tmp_path) as (engine, pool):
        with pytest.raises(Unsupported, match="rank 16"):
            await engine.create("large", LoraSpec(rank=16, seed=1))
        sampled = await engine.sample(_REQUEST)
        assert sampled.sequences[0].tokens.tolist() == [21, 22, 23]
        about_prompt = replace(_REQUEST, prompt_logprobs=True)
        assert (await engine.sample(about_prompt)).prompt_logprobs is not None
        await _until(lambda: len(_recorded(tmp_path / "record", _LOAD)) == 4)  # two versions, on each replica
        slow = replace(_REQUEST, prompt=np.array([vllm_stub.SLOW, 20], np.int32))
        running = asyncio.create_task(engine.sample(slow))
        completions = "/v1/completions"
        await _until(
            lambda: any(body["prompt"][0] == vllm_stub.SLOW for body in _recorded(tmp_path / "record", completions))
        )
        _kill_vllm(pool)
        await _until(lambda: pool.counts.moved > 0)
        assert (pool.counts.moved, running.done()) == (1, False)
        await engine.cancel("r")
        with pytest.raises(Gone):
            await running


@in_loop
async def test_request_is_moved_while_its_version_is_loaded(tiny_llama: Path, tmp_path: Path) -> None:
    """A vLLM that ends breaks its connections seconds before. To break it: leave out `_or_end` in
    `ReplicaSampler.attach`."""
    async with _vllm_cluster(tiny_llama, tmp_path) as (engine, pool):
        await engine.sample(_REQUEST)
        await _until(lambda: len(_recorded(tmp_path / "record", _LOAD)) == 4)
        (tmp_path / "faults").write_text(json.dumps({_LOAD: "die"}))
        await engine.attach("w", tmp_path / "v")
        running = asyncio.create_task(engine.sample(replace(_REQUEST, version="w")))
        await _until(lambda: len(_recorded(tmp_path / "record", _LOAD)) == 5)
        (tmp_path / "faults").unlink()  # the other replica loads it
        assert (await running).sequences[0].tokens.tolist() == [21, 22, 23]
        assert pool.counts.moved == 1


_LOAD = "/v1/load_lora_adapter"


def _kill_vllm(pool: SamplerPool) -> None:
    """Kill the vLLM of the replica that has a request."""
    victim = next(each for each in pool.status() if each.requests)
    for child in psutil.Process(victim.pid).children():
        child.kill()


async def _until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.05)
    raise AssertionError("it did not come to pass")


def _recorded(file: Path, path: str) -> list[Any]:
    """Bodies of the requests to a path of all stubs."""
    lines = file.read_text().splitlines() if file.exists() else []
    return [body for place, body in map(json.loads, lines) if place == path]
