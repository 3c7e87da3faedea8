"""Replicas of stubs of vLLM in this process, without the process of a worker around each."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path

from tinsmith.engine.base import ModelCard
from tinsmith.engine.cluster.replica import Launch, SamplerProcess
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.vllm.sampler import ZERO_ADAPTER, VllmSampler


class VllmProcess:
    """A VllmSampler as the engine of a `cluster.replica.SamplerProcess`."""

    def __init__(self, sampler: VllmSampler) -> None:
        self.died, self.pid = sampler.server.ended, sampler.server.pid
        self.attach, self.detach, self.sample = sampler.attach, sampler.detach, sampler.sample
        self.cancel, self.release_memory, self.close = sampler.cancel, sampler.release_memory, sampler.close
        self._sampler = sampler

    async def call(self, method: Callable[[VllmSampler], Awaitable[None]]) -> None:
        await method(self._sampler)


def launch_of(
    config: EngineConfig, card: ModelCard, adapter: Path, on_start: Callable[[VllmSampler], None] = lambda _: None
) -> Launch:
    """A launch of vLLM in this process, with an adapter for samples of the base model on a CPU."""

    async def launch() -> SamplerProcess:
        sampler = VllmSampler(config, card)
        try:
            await sampler.server.start()
        except BaseException:
            await sampler.close()
            raise
        on_start(sampler)
        if card.device == "cpu":
            await sampler.attach(ZERO_ADAPTER, adapter)

        async def ended() -> str:
            await sampler.server.ended.wait()
            return sampler.server.end.text if sampler.server.end is not None else ""

        return SamplerProcess(engine=VllmProcess(sampler), ended=ended)

    return launch


def write_adapter(folder: Path) -> Path:
    """An adapter folder that the stub takes."""
    folder.mkdir()
    settings = {"peft_type": "LORA", "r": 1, "lora_alpha": 32, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    (folder / "adapter_model.safetensors").write_text("")
    return folder
