"""Sampling with a vLLM server: its process, the adapter versions in it, and the requests that it runs.

A VllmSampler answers the requests that `completions.is_supported` names; `engine.vllm.engine` and the pool of a cluster
leave the others to the training engine.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx

from tinsmith.engine.base import LoraSpec, ModelCard, OnDelta, SampleRequest, SampleResult
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.device_sharing import MemoryTurns
from tinsmith.engine.interface import Trainer
from tinsmith.engine.vllm import completions
from tinsmith.engine.vllm.adapters import VersionHolder, VllmVersions
from tinsmith.engine.vllm.completions import CompletionParser
from tinsmith.engine.vllm.server import BASE, VllmServer
from tinsmith.errors import EngineDied, Gone

CONNECT_TIMEOUT_S = 10.0
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

    def __init__(
        self,
        holder: VersionHolder,
        config: EngineConfig,
        card: ModelCard,
        *,
        restarts: bool,
        turns: MemoryTurns | None = None,
        make_room: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`holder` has every version. The others are those of VllmServer."""
        self.card = card
        self.folder = Path(tempfile.mkdtemp(prefix="tinsmith-vllm-"))
        self.server = VllmServer(
            config.vllm,
            card,
            config.threads,
            self.folder,
            timeout_s=config.engine_timeout_s,
            restarts=restarts,
            turns=turns,
            make_room=make_room,
        )
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
        self._client = httpx.AsyncClient(limits=limits, timeout=timeout, trust_env=False)
        self.versions = VllmVersions(holder, self.server, self._client, config.vllm.rank, self.folder)
        self._running: dict[str, asyncio.Task[SampleResult]] = {}

    @property
    def progress(self) -> int:
        """Grows while vLLM answers."""
        return self.server.answers

    async def attach(self, version: str, source: Path) -> None:
        """Register an adapter folder as a version."""
        await self.versions.attach(version, source)

    async def detach(self, version: str) -> None:
        """Delete a version; unknown names are ignored."""
        await self.versions.detach(version)

    async def cancel(self, request_id: str) -> None:
        """Stop a request; its `sample` call raises Gone."""
        if (task := self._running.get(request_id)) is not None:
            task.cancel()

    async def release_memory(self) -> None:
        """The memory of vLLM is fixed at its start."""

    async def close(self) -> None:
        """End vLLM and delete its copies of versions."""
        await self.server.close()
        await self._client.aclose()
        shutil.rmtree(self.folder, ignore_errors=True)

    async def sample(self, request: SampleRequest, on_delta: OnDelta | None = None) -> SampleResult:
        """Sample in a task that `cancel` can end: vLLM stops when the connection is closed."""
        task = asyncio.create_task(self._sample_version(request, on_delta))
        self._running[request.request_id] = task
        try:
            await asyncio.wait([task])
        finally:
            task.cancel()
            del self._running[request.request_id]
        if task.cancelled():
            raise Gone(f"Request {request.request_id} was cancelled.", "Submit it again.")
        return task.result()

    async def _sample_version(self, request: SampleRequest, on_delta: OnDelta | None) -> SampleResult:
        if request.version is None and self.card.device != "cpu":
            return await self._complete(request, BASE, on_delta)
        async with self.versions.loaded(request.version or ZERO_ADAPTER) as lora_name:
            return await self._complete(request, lora_name, on_delta)

    async def _complete(self, request: SampleRequest, name: str, on_delta: OnDelta | None) -> SampleResult:
        await self.server.wait_until_up()
        async with self.server.turn(pausable=True):
            return await self._completed(request, name, on_delta)

    async def _completed(self, request: SampleRequest, name: str, on_delta: OnDelta | None) -> SampleResult:
        await self.server.wait_until_up()
        start = self.server.starts
        body = completions.request_body(request, self.card, name, stream=on_delta is not None)
        url, parser = f"{self.server.url}/v1/completions", CompletionParser(request)
        try:
            with self.server.sampling():
                if on_delta is None:
                    response = await self._client.post(url, json=body)
                    _check(response.status_code, response.text)
                    parser.add(response.json())
                else:
                    await self._stream(url, body, parser, on_delta)
        except httpx.TransportError as error:
            raise await self.server.connection_lost(start) from error
        except _Failed as error:
            raise await self.server.request_failed(start, f"vLLM failed: {error}"[:500]) from error
        return parser.result()

    async def _stream(self, url: str, body: dict[str, Any], parser: CompletionParser, on_delta: OnDelta) -> None:
        async with self._client.stream("POST", url, json=body) as response:
            if response.status_code != 200:
                _check(response.status_code, (await response.aread()).decode(errors="replace"))
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise _Failed(chunk["error"])
                for delta in parser.add(chunk):
                    on_delta(delta)


class _Failed(Exception):
    """vLLM answered with an error."""


def _check(status: int, text: str) -> None:
    if status == 404:  # the adapter was loaded into a vLLM that has ended since
        raise EngineDied("vLLM was restarted in the meantime.", "Submit the request again.", from_outside=True)
    if status != 200:
        raise _Failed(f"status {status}: {text}")
