"""An engine that samples with vLLM: it trains with weights of its own and gives vLLM adapter versions as files.

Training is done by the torch engine in its own process, as is all sampling for which vLLM has other semantics:
questions about the prompt, top_k and top_p, the last token of a context. vLLM is a process too. When it ends, running
requests fail with EngineDied, vLLM is restarted, and later requests wait until it is up.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from tinsmith.engine.base import AdamParams, LoraSpec, ModelCard, OnDelta, Pass, PassResult, SampleRequest, SampleResult
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.process import RemoteEngine
from tinsmith.engine.vllm import completions
from tinsmith.engine.vllm.adapters import VllmVersions
from tinsmith.engine.vllm.completions import CompletionParser
from tinsmith.engine.vllm.server import BASE, VllmServer, find_python
from tinsmith.errors import EngineDied, EngineError, Gone, TinsmithError

CONNECT_TIMEOUT_S = 10.0
ZERO_ADAPTER = "plain"
"""An adapter that changes nothing, for samples of the base model on a CPU: in a batch with rows that name an adapter,
vLLM's CPU code (0.32) applies the adapter of its last slot to rows that name none."""


class VllmEngine:
    """Implements `engine.base.Engine`; create it with `start`."""

    def __init__(self, torch_engine: RemoteEngine, config: EngineConfig) -> None:
        self.torch_engine = torch_engine
        self.died = torch_engine.died
        self._folder = Path(tempfile.mkdtemp(prefix="tinsmith-vllm-"))
        self.server = VllmServer(config.vllm, torch_engine.card, config.threads, self._folder)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
        self._client = httpx.AsyncClient(limits=limits, timeout=timeout, trust_env=False)
        self._versions = VllmVersions(torch_engine, self.server, self._client, config.vllm.rank, self._folder)
        self._running: dict[str, asyncio.Task[SampleResult]] = {}

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
        """Make ZERO_ADAPTER a version: in a new adapter, B is zero."""
        await self.torch_engine.create(ZERO_ADAPTER, LoraSpec(rank=1, seed=0, train_mlp=False, train_unembed=False))
        await self.torch_engine.save(ZERO_ADAPTER, self._folder / ZERO_ADAPTER, optimizer=False)
        await self.torch_engine.drop(ZERO_ADAPTER)
        await self._versions.attach(ZERO_ADAPTER, self._folder / ZERO_ADAPTER)

    @property
    def card(self) -> ModelCard:
        return self.torch_engine.card

    async def create(self, model_id: str, lora: LoraSpec) -> None:
        self._versions.check_rank("lora_config", lora.rank)
        await self.torch_engine.create(model_id, lora)

    async def run(self, passes: Sequence[Pass]) -> list[PassResult | TinsmithError]:
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
            return await self.torch_engine.sample(request, on_delta)
        if not completions.has_prompt_questions(request):
            return await self._sample(request, on_delta)
        prompt_task = asyncio.create_task(self.torch_engine.sample(completions.prompt_questions(request)))
        try:
            sampled, about_prompt = await self._sample(request, on_delta), await prompt_task
        finally:
            prompt_task.cancel()
        cached_tokens = sampled.prompt_cache_hit_tokens
        return replace(about_prompt, sequences=sampled.sequences, prompt_cache_hit_tokens=cached_tokens)

    async def cancel(self, request_id: str) -> None:
        if (task := self._running.get(request_id)) is not None:
            task.cancel()
        await self.torch_engine.cancel(request_id)

    async def close(self) -> None:
        await asyncio.gather(self.server.close(), self.torch_engine.close())
        await self._client.aclose()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _sample(self, request: SampleRequest, on_delta: OnDelta | None) -> SampleResult:
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
        async with self._versions.loaded(request.version or ZERO_ADAPTER) as lora_name:
            return await self._complete(request, lora_name, on_delta)

    async def _complete(self, request: SampleRequest, name: str, on_delta: OnDelta | None) -> SampleResult:
        await self.server.up.wait()
        body = completions.request_body(request, self.card, name, stream=on_delta is not None)
        url, parser = f"{self.server.url}/v1/completions", CompletionParser(request)
        try:
            if on_delta is None:
                response = await self._client.post(url, json=body)
                _check(response.status_code, response.text)
                parser.add(response.json())
            else:
                await self._stream(url, body, parser, on_delta)
        except httpx.TransportError as error:
            raise await self.server.connection_lost() from error
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
                    raise EngineError(f"vLLM failed: {chunk['error']}", "See vLLM's log.")
                for delta in parser.add(chunk):
                    on_delta(delta)


def _check(status: int, text: str) -> None:
    if status == 404:  # the adapter was loaded into a vLLM that has ended since
        raise EngineDied("vLLM was restarted in the meantime.", "Submit the request again.")
    if status != 200:
        raise EngineError(f"vLLM responded with status {status}: {text[:500]}", "See vLLM's log.")
