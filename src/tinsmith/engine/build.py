"""Loads the engine of some settings in this process."""

from __future__ import annotations

from tinsmith.engine.config import EngineConfig
from tinsmith.engine.interface import Engine
from tinsmith.errors import ConfigError


def build(config: EngineConfig) -> Engine:
    """Load an engine in this process. Raises ConfigError or Unsupported if the model cannot be served."""
    if config.sampler == "vllm":
        raise ConfigError("sampler: vllm needs processes of its own.", "Use engine.cluster.cluster.ModelCluster.")
    if config.kind == "fake":
        from tinsmith.engine.fake.engine import FakeEngine

        return FakeEngine(config)
    from tinsmith.engine.torch_engine import TorchEngine

    return TorchEngine(config)
