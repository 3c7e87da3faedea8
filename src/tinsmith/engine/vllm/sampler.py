"""A vLLM server as a sampler: its process, the adapter versions in it, and the requests that it runs.

A VllmSampler answers the requests that `client.is_supported` names; the pool leaves the others to the trainer.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Awaitable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from tinsmith.engine.base import LoraSpec, ModelCard, OnDelta, SampleRequest, SampleResult
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.interface import Trainer
from tinsmith.engine.vllm.adapters import VllmVersions
from tinsmith.engine.vllm.client import VllmClient
from tinsmith.engine.vllm.server import EXIT_NOTICE_S, VllmServer
from tinsmith.errors import EngineDied, Gone

T = TypeVar("T")
ZERO_ADAPTER = "plain"
"""An adapter that changes nothing, for samples of the base model on a CPU: in a batch with rows that name an adapter,
vLLM's CPU code (0.32) applies the adapter of its last slot to rows that name none."""


async def write_zero_adapter(trainer: Trainer, folder: Path) -> None:
    """Write ZERO_ADAPTER: in a new adapter, B is zero."""
    await trainer.create(ZERO_ADAPTER, LoraSpec(rank=1, seed=0, train_mlp=False, train_unembed=False))
    await trainer.save(ZERO_ADAPTER, folder, optimizer=False)
    await trainer.drop(ZERO_ADAPTER)


class VllmSampler:
    """A vLLM server and what it samples."""

    def __init__(self, config: EngineConfig, card: ModelCard) -> None:
        self.card = card
        self.folder = Path(tempfile.mkdtemp(prefix="tinsmith-vllm-"))
        timeout_s = config.engine_timeout_s
        self.server = VllmServer(config.vllm, card, config.threads, self.folder, timeout_s=timeout_s)
        self._client = VllmClient(self.server)
        self._versions = VllmVersions(self.server, self._client, config.vllm.rank, self.folder)
        self._running: dict[str, asyncio.Task[SampleResult]] = {}

    @property
    def progress(self) -> int:
        """Grows while vLLM answers."""
        return self.server.answers

    async def attach(self, version: str, source: Path) -> None:
        """Register an adapter folder as a version and load it."""
        await self._or_end(self._versions.attach(version, source))

    async def detach(self, version: str) -> None:
        """Delete a version; unknown names are ignored."""
        await self._versions.detach(version)

    async def cancel(self, request_id: str) -> None:
        """Stop a request; its `sample` call raises Gone."""
        if (task := self._running.get(request_id)) is not None:
            task.cancel()

    async def release_memory(self) -> None:
        """The memory of vLLM is fixed at its start."""

    async def sleep(self) -> None:
        """Give the memory of the GPU back and pause all requests."""
        await self.server.sleep()

    async def wake_up(self) -> None:
        """Go on with the requests."""
        await self.server.wake_up()

    async def close(self) -> None:
        """End vLLM and delete its links to versions."""
        await self.server.close()
        await self._client.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    async def sample(self, request: SampleRequest, on_delta: OnDelta | None = None) -> SampleResult:
        """Sample in a task that `cancel` can end: vLLM stops when the connection is closed."""
        task = asyncio.create_task(self._sample(request, on_delta))
        self._running[request.request_id] = task
        try:
            await asyncio.wait([task])
        finally:
            task.cancel()
            del self._running[request.request_id]
        if task.cancelled():
            raise Gone(f"Request {request.request_id} was cancelled.", "Submit it again.")
        return await self._or_end(task)

    async def _sample(self, request: SampleRequest, on_delta: OnDelta | None) -> SampleResult:
        if request.version is None and self.card.device != "cpu":
            return await self._client.complete(request, self.card, self.server.name, on_delta)
        async with self._versions.loaded(request.version or ZERO_ADAPTER) as lora_name:
            return await self._client.complete(request, self.card, lora_name, on_delta)

    async def _or_end(self, call: Awaitable[T]) -> T:
        """The result of a call. If vLLM has ended, its error comes once that is known everywhere: `server.ended`."""
        try:
            return await call
        except EngineDied:
            with suppress(TimeoutError):
                async with asyncio.timeout(EXIT_NOTICE_S):
                    await self.server.ended.wait()
            raise
