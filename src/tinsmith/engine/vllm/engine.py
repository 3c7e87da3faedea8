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

from typing_extensions import override

from tinsmith.engine.base import LoraSpec, OnDelta, Pass, PassResult, SampleRequest, SampleResult
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.device_sharing import POLICIES, MemoryTurns, Workload
from tinsmith.engine.processes.client import RemoteEngine, start_local
from tinsmith.engine.processes.rpc import DelegatingEngine
from tinsmith.engine.vllm import completions
from tinsmith.engine.vllm.sampler import ZERO_ADAPTER, VllmSampler, write_zero_adapter
from tinsmith.engine.vllm.server import VllmServer, find_python, sleeps
from tinsmith.errors import TinsmithError

log = logging.getLogger(__name__)

RELEASE_S = 10.0
"""Time for the torch engine to give back memory: it does so between two micro-batches."""


class VllmEngine(DelegatingEngine):
    """Implements `engine.interface.Engine`; create it with `start`."""

    def __init__(self, torch_engine: RemoteEngine, config: EngineConfig) -> None:
        super().__init__(torch_engine)
        self.torch_engine = torch_engine
        self.died = torch_engine.died
        card = torch_engine.card
        self._turns = MemoryTurns(self._hand_over, POLICIES[config.sharing]) if sleeps(config.vllm, card) else None
        self._vllm = VllmSampler(
            torch_engine, config, card, restarts=True, turns=self._turns, make_room=self._release_trainer
        )
        self._versions = self._vllm.versions

    @classmethod
    async def start(cls, config: EngineConfig) -> VllmEngine:
        """Start both processes and load the model. Raises ConfigError first, if vLLM is not installed."""
        await asyncio.to_thread(find_python, config.vllm)
        torch_engine = await start_local(config.model_copy(update={"sampler": "torch"}))
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
        folder = self._vllm.folder / ZERO_ADAPTER
        await write_zero_adapter(self.torch_engine, folder)
        await self._versions.attach(ZERO_ADAPTER, folder)

    @property
    def server(self) -> VllmServer:
        """The process of vLLM."""
        return self._vllm.server

    @override
    async def create(self, model_id: str, lora: LoraSpec) -> None:
        self._versions.check_rank("lora_config", lora.rank)
        await self.torch_engine.create(model_id, lora)

    @override
    async def run(self, passes: Sequence[Pass]) -> list[PassResult | TinsmithError]:
        async with self._trainers_turn():
            return await self.torch_engine.run(passes)

    @override
    async def capture(self, model_id: str, version: str) -> None:
        await self._versions.capture(model_id, version)

    @override
    async def persist(self, version: str, to: Path) -> int:
        return await self._versions.persist(version, to)

    @override
    async def attach(self, version: str, source: Path) -> None:
        await self._versions.attach(version, source)

    @override
    async def detach(self, version: str) -> None:
        await self._versions.detach(version)

    @override
    async def sample(self, request: SampleRequest, on_delta: OnDelta | None = None) -> SampleResult:
        if not completions.is_supported(request, self.card):
            return await self._sample_on_trainer(request, on_delta)
        if not completions.has_prompt_questions(request):
            return await self._vllm.sample(request, on_delta)
        prompt_task = asyncio.create_task(self._sample_on_trainer(completions.prompt_questions(request)))
        try:
            sampled, about_prompt = await self._vllm.sample(request, on_delta), await prompt_task
        finally:
            prompt_task.cancel()
        cached_tokens = sampled.prompt_cache_hit_tokens
        return replace(about_prompt, sequences=sampled.sequences, prompt_cache_hit_tokens=cached_tokens)

    @override
    async def cancel(self, request_id: str) -> None:
        await self._vllm.cancel(request_id)
        await self.torch_engine.cancel(request_id)

    @override
    async def close(self) -> None:
        await asyncio.gather(self._vllm.close(), self.torch_engine.close())
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
