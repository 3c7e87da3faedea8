"""A group of one rank on a GPU, and a vLLM replica: NCCL, FSDP2 and versions as far as one GPU can show; run by
`make gpu-check`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.data import pass_for
from tinsmith.engine.base import AdamParams, LoraSpec, PassResult, SampleRequest
from tinsmith.engine.cluster.config import ClusterConfig
from tinsmith.engine.cluster.launches import vllm_in_slot
from tinsmith.engine.cluster.pool import SamplerPool
from tinsmith.engine.cluster.trainers.group import start_group
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.processes.client import start_engine
from tinsmith.engine.processes.slots import LocalSlot, LocalSlots
from tinsmith.engine.vllm.server import find_python
from tinsmith.engine_options import VllmConfig
from tinsmith.errors import ConfigError

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
        slots = LocalSlots()
        try:
            group = await start_group(
                await slots.reserve(1, name="trainer", gpus=1), config, ClusterConfig(**settings), 1
            )
            return expected, await logprobs_after_steps(group)
        finally:
            await slots.close()

    expected, actual = asyncio.run(train())
    np.testing.assert_allclose(actual, expected, atol=1e-3)


def test_vllm_replica_on_gpu_samples_a_version(smollm2: Path, tmp_path: Path) -> None:
    """A training process and a vLLM server in slots of one GPU; the version goes from one to the other as files."""
    try:
        python = find_python(VllmConfig())
    except ConfigError as error:
        pytest.skip(f"no vLLM here: {error}")
    settings = VllmConfig(python=python, rank=8, memory=0.3, args=("--enforce-eager",))
    config = EngineConfig(source=str(smollm2), device="cuda", sampler="vllm", vllm=settings)
    request = SampleRequest(
        request_id="r", prompt=np.array([504, 2365, 6354], np.int32), version="v", max_tokens=4, temperature=0.0
    )

    async def sample() -> None:
        trainer_slot, sampler_slot = (LocalSlot(name, ("0",)) for name in ("trainer-0", "sampler-0"))
        torch_only = config.model_copy(update={"sampler": "torch"})
        trainer = await start_engine(trainer_slot, torch_only, config.source, 1)
        pool = await SamplerPool.start(
            [vllm_in_slot(sampler_slot, config, trainer.card, None)], trainer.card, trainer=trainer
        )
        try:
            await trainer.create("gpu", LoraSpec(rank=8, seed=1))
            await pool.capture("gpu", "v")
            await pool.persist("v", tmp_path / "v")
            sampled, expected = await pool.sample(request), await trainer.sample(request)
            assert sampled.sequences[0].tokens[0] == expected.sequences[0].tokens[0]
            assert [each.versions for each in pool.status()] == [1]
        finally:
            await pool.close()
            await trainer.close()

    asyncio.run(sample())
