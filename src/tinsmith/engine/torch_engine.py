"""The engine in plain torch, CPU or GPU: a trainer and a sampler over the same weights, in one process.

Neither computes while the other does: each hands the turn over between micro-batches and between tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from tinsmith.engine import autotune
from tinsmith.engine.base import AdamParams, Heard, LoraSpec, ModelCard, Pass, PassResult, Sampled, SampleRequest
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.device_sharing import POLICIES, DeviceScheduler
from tinsmith.engine.lora import layers, linear
from tinsmith.engine.lora.lm_head import Head
from tinsmith.engine.model import loading
from tinsmith.engine.model.memory import Trimmer, free_bytes
from tinsmith.engine.sampling.sampler import TorchSampler
from tinsmith.engine.training import activation_checkpointing
from tinsmith.engine.training.trainer import TorchTrainer
from tinsmith.errors import TinsmithError


class TorchEngine:
    """Implements `engine.base.Engine`. Sets torch's thread count and matmul precision for its whole process."""

    def __init__(self, config: EngineConfig, base: loading.BaseModel | None = None) -> None:
        """`base` takes the place of what `config.source` names."""
        if config.threads:
            torch.set_num_threads(config.threads)
        base = base or loading.load(config)
        autotune.round_products(base.dtype)
        policy = POLICIES[config.sharing]
        router, scheduler = linear.adapt(base), DeviceScheduler(policy)
        base, head = layers.take_over(base), Head(base.head)
        self._heap = Trimmer()
        autotune.order(base, free_bytes())
        autotune.warm(base)
        switch = activation_checkpointing.install(base)
        with switch.set(config.recompute == "always"):
            tokens = autotune.chosen(config.pass_tokens, base, router)
        packed = max(1, round(policy.micro_batch_share * tokens))
        self._card = replace(base.card, pass_tokens=packed)
        self.trainer = TorchTrainer(base, head, router, scheduler, packed, switch, config.recompute)
        self.sampler = TorchSampler(base, head, router, scheduler, tokens, config.cache_tokens)
        self._heap.now()  # matrices in another order leave the room of the plain ones

    @property
    def card(self) -> ModelCard:
        return self._card

    async def create(self, model_id: str, lora: LoraSpec) -> None:
        await self.trainer.create(model_id, lora)

    async def run(self, passes: Sequence[Pass]) -> list[PassResult | TinsmithError]:
        results = await self.trainer.run(passes)
        self._heap.after_work()
        return results

    async def step(self, model_id: str, adam: AdamParams) -> dict[str, float]:
        return await self.trainer.step(model_id, adam)

    async def save(self, model_id: str, to: Path, *, optimizer: bool) -> int:
        return await self.trainer.save(model_id, to, optimizer=optimizer)

    async def load(self, model_id: str, source: Path, *, optimizer: bool) -> None:
        await self.trainer.load(model_id, source, optimizer=optimizer)

    async def drop(self, model_id: str) -> None:
        await self.trainer.drop(model_id)

    async def capture(self, model_id: str, version: str) -> None:
        self.sampler.versions.capture(version, self.trainer.capture(model_id))

    async def persist(self, version: str, to: Path) -> int:
        return await self.sampler.versions.persist(version, to)

    async def attach(self, version: str, source: Path) -> None:
        self.sampler.versions.attach(version, source)

    async def detach(self, version: str) -> None:
        self.sampler.versions.detach(version)

    async def sample(self, request: SampleRequest, heard: Heard | None = None) -> Sampled:
        return await self.sampler.sample(request, heard)

    async def cancel(self, request_id: str) -> None:
        await self.sampler.cancel(request_id)

    async def close(self) -> None:
        """Memory is freed with the object."""
