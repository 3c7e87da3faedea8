"""Starts engines that consist of several processes: training and sampling processes of each base model."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

from tinsmith.engine.adapters.cache import ObjectSettings
from tinsmith.engine.adapters.transfer import FolderTransfer
from tinsmith.engine.cluster.cluster import ModelCluster
from tinsmith.engine.cluster.config import ClusterConfig
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.processes.slots import LocalSlots, Slots
from tinsmith.engine.processes.tls import Identity
from tinsmith.errors import ConfigError
from tinsmith.service.engines.host import EngineFactory, RunningEngine, start_engine


class ClusterFactory:
    """Starts the engines of one service, and starts them again. An EngineFactory."""

    def __init__(self, cluster: ClusterConfig, folder: Path, transfer: FolderTransfer | None = None) -> None:
        """`folder`: the data folder; `transfer`: how files in it reach machines, which need not see it with a store."""
        self._cluster, self._folder, self.transfer = cluster, folder, transfer or FolderTransfer()
        self._slots: Slots | None = None
        self._connecting = asyncio.Lock()
        self._models: dict[str, ModelCluster] = {}
        """By source."""

    async def __call__(self, config: EngineConfig) -> RunningEngine:
        async with self._connecting:
            self._slots = self._slots or await connect_slots(self._cluster)
        model = self._models.get(config.source) or self._new_model(config, self._slots)
        engine = await model.start()
        self._models[config.source] = model
        return RunningEngine(
            engine=engine,
            died=engine.trainer.died,
            process=engine.trainer,
            sampler_up=model.pool.up if model.pool is not None else None,
            pool=model.pool,
            processes=model.status,
            retire=partial(self._retire, config.source),
        )

    def _new_model(self, config: EngineConfig, slots: Slots) -> ModelCluster:
        return ModelCluster(config, self._cluster, slots, self._folder, self.transfer)

    async def _retire(self, source: str) -> None:
        model = self._models.pop(source, None)
        if model is not None:
            await model.close()


async def connect_slots(cluster: ClusterConfig) -> Slots:
    """The machines of the settings. Raises ConfigError if they cannot be used."""
    identity = Identity.new() if cluster.tls else None
    if cluster.address is None:
        return LocalSlots(identity)
    try:
        from tinsmith.engine.processes.ray_slots import RaySlots
    except ImportError as error:
        raise ConfigError(
            f"--cluster needs Ray, which is not installed ({error}).",
            "pip install 'tinsmith[cluster]', the same versions on all machines",
        ) from error
    return await RaySlots.connect(cluster.address, identity)


def engine_factory(
    cluster: ClusterConfig, folder: Path, store: str | None = None, cache_bytes: int = 0, *, has_vllm: bool = False
) -> EngineFactory:
    """How the engines of a service with these settings, this data folder and this object store start. `has_vllm`:
    whether vLLM samples, which takes processes beside the trainer."""
    if cluster.is_single:
        return ClusterFactory(cluster, folder) if has_vllm else start_engine
    objects = ObjectSettings(url=store, cache_bytes=cache_bytes, cache=cluster.cache) if store is not None else None
    return ClusterFactory(cluster, folder, FolderTransfer(objects))


def transfer_of(start: EngineFactory) -> FolderTransfer | None:
    """How the files of a factory's engines travel; None for engines that see the data folder."""
    return start.transfer if isinstance(start, ClusterFactory) else None
