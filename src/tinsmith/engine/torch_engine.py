"""The engine in plain PyTorch, on CPU or GPU: a trainer and a sampler that share one base model, in one process.

The two take turns on the device: the trainer yields between micro-batches, the sampler between tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from tinsmith.engine import autotune
from tinsmith.engine.base import AdamParams, LoraSpec, ModelCard, OnDelta, Pass, PassResult, SampleRequest, SampleResult
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.device_sharing import POLICIES, DeviceScheduler
from tinsmith.engine.lora import layers, linear
from tinsmith.engine.lora.lm_head import LMHead
from tinsmith.engine.model import loading
from tinsmith.engine.model.memory import HeapTrimmer, free_bytes
from tinsmith.engine.sampling.sampler import TorchSampler
from tinsmith.engine.training import activation_checkpointing
from tinsmith.engine.training.trainer import TorchTrainer
from tinsmith.errors import TinsmithError


class TorchEngine:
    """Implements `engine.base.Engine`. Sets torch's thread count and matmul precision for the whole process."""

    def __init__(self, config: EngineConfig, base: loading.BaseModel | None = None) -> None:
        """`base` replaces the model that `config.source` names."""
        if config.threads:
            torch.set_num_threads(config.threads)
        base = base or loading.load(config)
        autotune.set_matmul_precision(base.dtype)
        policy = POLICIES[config.sharing]
        router, scheduler = linear.adapt(base), DeviceScheduler(policy)
        base, head = layers.replace_layers(base), LMHead(base.head)
        self._heap = HeapTrimmer()
        autotune.reorder_weights(base, free_bytes())
        autotune.compile_attention(base)
        switch = activation_checkpointing.install(base)
        with switch.set(config.recompute == "always"):
            tokens = autotune.resolve_pass_tokens(config.pass_tokens, base, router)
        training_tokens = max(1, round(policy.micro_batch_share * tokens))
        self._card = replace(base.card, pass_tokens=training_tokens)
        self.trainer = TorchTrainer(base, head, router, scheduler, training_tokens, switch, config.recompute)
        self.sampler = TorchSampler(base, head, router, scheduler, tokens, config.cache_tokens)
        self._heap.trim()  # reordered weights have freed the original ones

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

    async def sample(self, request: SampleRequest, on_delta: OnDelta | None = None) -> SampleResult:
        return await self.sampler.sample(request, on_delta)

    async def cancel(self, request_id: str) -> None:
        await self.sampler.cancel(request_id)

    async def close(self) -> None:
        """Memory is freed with the object."""
