"""From a configuration to an engine: the only file that knows all of them."""

from __future__ import annotations

from tinsmith.engine.base import Engine
from tinsmith.engine.config import EngineConfig
from tinsmith.errors import ConfigError


def build(config: EngineConfig) -> Engine:
    """A loaded engine of this process. Raises ConfigError or Unsupported when the model is not to be served."""
    if config.sampler == "vllm":
        raise ConfigError("An engine of one process samples by itself.", "With a vLLM: engine.vllm.VllmEngine.start.")
    if config.kind == "fake":
        from tinsmith.engine.fake import FakeEngine

        return FakeEngine(config)
    from tinsmith.engine.torch_engine import TorchEngine

    return TorchEngine(config)
