"""An engine that samples with vLLM: it trains with weights of its own and gives vLLM adapter versions as files.

Training is done by the torch engine in its own process, as is all sampling for which vLLM has other semantics:
questions about the prompt, top_k and top_p, the last token of a context. vLLM is a process too. When it ends, running
requests fail with EngineDied, vLLM is restarted, and later requests wait until it is up.

A vLLM on the trainer's GPU may have its memory there in turns with it (`vllm.sleep`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from tinsmith.engine.base import AdamParams, LoraSpec, ModelCard, OnDelta, Pass, PassResult, SampleRequest, SampleResult
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.device_sharing import POLICIES, MemoryTurns, Workload
from tinsmith.engine.remote import RemoteEngine
from tinsmith.engine.vllm import completions
from tinsmith.engine.vllm.sampler import ZERO_ADAPTER, VllmSampler, write_zero_adapter
from tinsmith.engine.vllm.server import VllmServer, find_python, sleeps
from tinsmith.errors import TinsmithError

log = logging.getLogger(__name__)

RELEASE_S = 10.0
"""Time for the torch engine to give back memory: it does so between two micro-batches."""


class VllmEngine:
    """Implements `engine.interface.Engine`; create it with `start`."""

    def __init__(self, torch_engine: RemoteEngine, config: EngineConfig) -> None:
        self.torch_engine = torch_engine
        self.died = torch_engine.died
        card = torch_engine.card
        self._turns = MemoryTurns(self._hand_over, POLICIES[config.sharing]) if sleeps(config.vllm, card) else None
        self._sampler = VllmSampler(
            torch_engine, config, card, restarts=True, turns=self._turns, make_room=self._release_trainer
        )
        self._versions = self._sampler.versions

    @classmethod
    async def start(cls, config: EngineConfig) -> VllmEngine:
        """Start both processes and load the model. Raises ConfigError first, if vLLM is not installed."""
        await asyncio.to_thread(find_python, config.vllm)
        torch_engine = await RemoteEngine.start(config.model_copy(update={"sampler": "torch"}))
        engine = cls(torch_engine, config)
        try:
            await engine.server.start()
            if torch_engine.card.device == "cpu":
                await engine.add_zero_adapter()
        except BaseException:
            await engine.close()
            raise
        return engine

    async def add_zero_adapter(self) -> None:
        """Make ZERO_ADAPTER a version."""
        folder = self._sampler.folder / ZERO_ADAPTER
        await write_zero_adapter(self.torch_engine, folder)
        await self._versions.attach(ZERO_ADAPTER, folder)

    @property
    def server(self) -> VllmServer:
        """The process of vLLM."""
        return self._sampler.server

    @property
    def card(self) -> ModelCard:
        return self.torch_engine.card

    @property
    def progress(self) -> int:
        return self.torch_engine.progress

    async def create(self, model_id: str, lora: LoraSpec) -> None:
        self._versions.check_rank("lora_config", lora.rank)
        await self.torch_engine.create(model_id, lora)

    async def fork(self, model_id: str, source: str | Path, *, optimizer: bool) -> int:
        return await self.torch_engine.fork(model_id, source, optimizer=optimizer)

    async def run(self, passes: Sequence[Pass]) -> list[PassResult | TinsmithError]:
        async with self._trainers_turn():
            return await self.torch_engine.run(passes)

    async def step(self, model_id: str, adam: AdamParams) -> dict[str, float]:
        return await self.torch_engine.step(model_id, adam)

    async def save(self, model_id: str, to: Path, *, optimizer: bool) -> int:
        return await self.torch_engine.save(model_id, to, optimizer=optimizer)

    async def load(self, model_id: str, source: Path, *, optimizer: bool) -> None:
        await self.torch_engine.load(model_id, source, optimizer=optimizer)

    async def drop(self, model_id: str) -> None:
        await self.torch_engine.drop(model_id)

    async def capture(self, model_id: str, version: str) -> None:
        await self._versions.capture(model_id, version)

    async def persist(self, version: str, to: Path) -> int:
        return await self._versions.persist(version, to)

    async def attach(self, version: str, source: Path) -> None:
        await self._versions.attach(version, source)

    async def detach(self, version: str) -> None:
        await self._versions.detach(version)

    async def sample(self, request: SampleRequest, on_delta: OnDelta | None = None) -> SampleResult:
        if not completions.is_supported(request, self.card):
            return await self._sample_on_trainer(request, on_delta)
        if not completions.has_prompt_questions(request):
            return await self._sampler.sample(request, on_delta)
        prompt_task = asyncio.create_task(self._sample_on_trainer(completions.prompt_questions(request)))
        try:
            sampled, about_prompt = await self._sampler.sample(request, on_delta), await prompt_task
        finally:
            prompt_task.cancel()
        cached_tokens = sampled.prompt_cache_hit_tokens
        return replace(about_prompt, sequences=sampled.sequences, prompt_cache_hit_tokens=cached_tokens)

    async def cancel(self, request_id: str) -> None:
        await self._sampler.cancel(request_id)
        await self.torch_engine.cancel(request_id)

    async def release_memory(self) -> None:
        """Memory of the torch engine; that of vLLM is fixed at its start."""
        await self.torch_engine.release_memory()

    async def close(self) -> None:
        await asyncio.gather(self._sampler.close(), self.torch_engine.close())
        if self._turns is not None:
            await self._turns.close()

    async def _sample_on_trainer(self, request: SampleRequest, on_delta: OnDelta | None = None) -> SampleResult:
        async with self._trainers_turn():
            return await self.torch_engine.sample(request, on_delta)

    @asynccontextmanager
    async def _trainers_turn(self) -> AsyncIterator[None]:
        """The torch engine may compute inside the block; a vLLM that can sleep does."""
        if self._turns is None:
            yield
            return
        async with self._turns.turn("training"):
            yield

    async def _hand_over(self, workload: Workload) -> None:
        if workload == "training":
            await self.server.sleep()
        else:
            await self._release_trainer()
            await self.server.wake_up()

    async def _release_trainer(self) -> None:
        """Let the torch engine give back what it does not need; within RELEASE_S, for it may be at work."""
        try:
            async with asyncio.timeout(RELEASE_S):
                await self.torch_engine.release_memory()
        except (TinsmithError, TimeoutError) as error:
            log.warning("The trainer keeps its caches while vLLM starts or wakes up: %s", error or "it is busy")
