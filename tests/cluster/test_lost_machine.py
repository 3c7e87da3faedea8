"""A machine of a Ray cluster that is lost for good: a group goes on with the training processes that are left."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from tests.cluster.conftest import RayCluster
from tests.engine.data import pass_for
from tinsmith.engine.base import AdamParams, LoraSpec
from tinsmith.engine.cluster.cluster import ModelCluster
from tinsmith.engine.cluster.config import ClusterConfig
from tinsmith.engine.config import EngineConfig

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


def test_group_goes_on_with_fewer_ranks_and_the_same_bits(
    ray_cluster: RayCluster, tiny_llama: Path, tmp_path: Path
) -> None:
    """Fails if processes of a dead machine never count as ended (`_is_lost` in ray_slots)."""
    from tinsmith.engine.processes.ray_slots import RaySlots

    config = EngineConfig(
        source=str(tiny_llama), dtype="float32", device="cpu", threads=1, pass_tokens=64, deterministic=True
    )
    settings = ClusterConfig(address=ray_cluster.address, trainers=4, min_trainers=2, shards=4)

    async def step(engine: Any, folder: Path) -> dict[str, Any]:
        await engine.create("m", LoraSpec(rank=4, seed=1))
        await engine.run([pass_for("ppo", "m", seed=1, lengths=(30, 12, 17, 9, 14))])
        await engine.step("m", AdamParams(learning_rate=1e-3))
        await engine.save("m", folder, optimizer=True)
        return {name: array.tobytes() for name, array in load_file(folder / "adapter_model.safetensors").items()}

    async def run() -> None:
        slots = await RaySlots.connect(ray_cluster.address)
        model = ModelCluster(config, settings, slots, tmp_path)
        try:
            engine = await model.start()
            before = await step(engine, tmp_path / "before")
            ray_cluster.kill(ray_cluster.nodes[0])
            await asyncio.wait_for(engine.trainer.died.wait(), 60)
            again = await model.start()
            assert sum(process.is_up for process in model.status()) == 2
            assert await step(again, tmp_path / "again") == before
        finally:
            await model.close()
            ray_cluster.add_node()

    asyncio.run(run())
