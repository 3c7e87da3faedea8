"""Starts engines that consist of several processes: training and sampling processes of each base model."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

from tinsmith.engine.cluster.cluster import ModelCluster
from tinsmith.engine.cluster.config import ClusterConfig
from tinsmith.engine.cluster.placement import Places, Subprocesses
from tinsmith.engine.config import EngineConfig
from tinsmith.errors import ConfigError
from tinsmith.service.engines.host import EngineFactory, RunningEngine, start_engine


class ClusterFactory:
    """Starts the engines of one service, and starts them again. An EngineFactory."""

    def __init__(self, cluster: ClusterConfig, folder: Path) -> None:
        """`folder`: the data folder, which all machines must see."""
        self._cluster, self._folder = cluster, folder
        self._places: Places | None = None
        self._connecting = asyncio.Lock()
        self._models: dict[str, ModelCluster] = {}
        """By source."""

    async def __call__(self, config: EngineConfig) -> RunningEngine:
        async with self._connecting:
            self._places = self._places or await connect_places(self._cluster)
        model = self._models.get(config.source) or ModelCluster(config, self._cluster, self._places, self._folder)
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

    async def _retire(self, source: str) -> None:
        model = self._models.pop(source, None)
        if model is not None:
            await model.close()


async def connect_places(cluster: ClusterConfig) -> Places:
    """The machines of the settings. Raises ConfigError if they cannot be used."""
    if cluster.address is None:
        return Subprocesses()
    try:
        from tinsmith.engine.cluster.machines.ray_places import RayPlaces
    except ImportError as error:
        raise ConfigError(
            f"--cluster needs Ray, which is not installed ({error}).",
            "pip install 'tinsmith[cluster]', the same versions on all machines",
        ) from error
    return await RayPlaces.connect(cluster.address)


def engine_factory(cluster: ClusterConfig, folder: Path) -> EngineFactory:
    """How the engines of a service with these settings and this data folder start."""
    return start_engine if cluster.is_single else ClusterFactory(cluster, folder)
