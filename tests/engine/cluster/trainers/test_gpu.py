"""A group of one rank on a GPU: NCCL and FSDP2 as far as one GPU can show; run by `make gpu-check`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.data import pass_for
from tinsmith.engine.base import AdamParams, LoraSpec, PassResult
from tinsmith.engine.cluster.config import ClusterConfig
from tinsmith.engine.cluster.placement import Subprocesses
from tinsmith.engine.cluster.trainers.group import start_group
from tinsmith.engine.config import EngineConfig

pytestmark = pytest.mark.gpu


async def logprobs_after_steps(engine: Any) -> np.ndarray:
    await engine.create("gpu", LoraSpec(rank=4, seed=1))
    for seed in range(3):
        (result,) = await engine.run([pass_for("ppo", "gpu", seed=seed)])
        assert isinstance(result, PassResult)
        await engine.step("gpu", AdamParams(learning_rate=1e-3))
    return np.concatenate(result.logprobs)


@pytest.mark.parametrize("settings", [{"shards": 2}, {"shard": True}], ids=["nccl", "fsdp2"])
def test_group_of_one_rank_on_gpu_trains_as_one_engine_does(
    settings: dict[str, Any], tiny_llama: Path, engine_of: Callable[..., Any]
):
    deterministic = "shards" in settings
    config = EngineConfig(source=str(tiny_llama), dtype="float32", device="cuda", deterministic=deterministic)

    async def train() -> tuple[np.ndarray, np.ndarray]:
        expected = await logprobs_after_steps(engine_of("llama", device="cuda"))
        places = Subprocesses()
        try:
            group = await start_group(
                await places.seats(1, name="trainer", gpus=1), config, ClusterConfig(**settings), 1
            )
            return expected, await logprobs_after_steps(group)
        finally:
            await places.close()

    expected, actual = asyncio.run(train())
    np.testing.assert_allclose(actual, expected, atol=1e-3)
