"""An engine whose samples a vLLM draws: it has weights of its own, and gets adapter versions as files.

Training, and whatever vLLM does not answer as we mean it, is done by the torch engine underneath: questions about the
prompt, top_k and top_p, the last token of a context. Both are processes of their own. When vLLM ends, what it was asked
ends with EngineDied, it is started again, and later requests wait until it answers.
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

from tinsmith.engine.base import AdamParams, Heard, LoraSpec, ModelCard, Pass, PassResult, Sampled, SampleRequest
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.process import RemoteEngine
from tinsmith.engine.vllm import completions as wire
from tinsmith.engine.vllm.adapters import VllmVersions
from tinsmith.engine.vllm.server import BASE, VllmServer, find_python
from tinsmith.errors import EngineDied, EngineError, Gone, TinsmithError

CONNECT_S = 10.0
PLAIN = "plain"
"""An adapter that adds nothing, for samples of the base model on a CPU: where other rows of a batch name an adapter,
vLLM's CPU code (0.32) computes those that name none with its last slot's."""


class VllmEngine:
    """Implements `engine.base.Engine`; make one with `start`."""

    def __init__(self, trained: RemoteEngine, config: EngineConfig) -> None:
        self.trained = trained
        self.died = trained.died
        self._folder = Path(tempfile.mkdtemp(prefix="tinsmith-vllm-"))
        self.server = VllmServer(config.vllm, trained.card, config.threads, self._folder)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        timeout = httpx.Timeout(None, connect=CONNECT_S)
        self._client = httpx.AsyncClient(limits=limits, timeout=timeout, trust_env=False)
        self._versions = VllmVersions(trained, self.server, self._client, config.vllm.rank, self._folder)
        self._running: dict[str, asyncio.Task[Sampled]] = {}

    @classmethod
    async def start(cls, config: EngineConfig) -> VllmEngine:
        """Both processes, loaded. Raises ConfigError where there is no vLLM, before anything is loaded."""
        await asyncio.to_thread(find_python, config.vllm)
        trained = await RemoteEngine.start(config.model_copy(update={"sampler": "torch"}))
        engine = cls(trained, config)
        try:
            await engine.server.start()
            if trained.card.device == "cpu":
                await engine.plain()
        except BaseException:
            await engine.close()
            raise
        return engine

    async def plain(self) -> None:
        """Make the adapter that adds nothing: a fresh one's B is zero."""
        await self.trained.create(PLAIN, LoraSpec(rank=1, seed=0, train_mlp=False, train_unembed=False))
        await self.trained.save(PLAIN, self._folder / PLAIN, optimizer=False)
        await self.trained.drop(PLAIN)
        await self._versions.attach(PLAIN, self._folder / PLAIN)

    @property
    def card(self) -> ModelCard:
        return self.trained.card

    async def create(self, model_id: str, lora: LoraSpec) -> None:
        self._versions.check("lora_config", lora.rank)
        await self.trained.create(model_id, lora)

    async def run(self, passes: Sequence[Pass]) -> list[PassResult | TinsmithError]:
        return await self.trained.run(passes)

    async def step(self, model_id: str, adam: AdamParams) -> dict[str, float]:
        return await self.trained.step(model_id, adam)

    async def save(self, model_id: str, to: Path, *, optimizer: bool) -> int:
        return await self.trained.save(model_id, to, optimizer=optimizer)

    async def load(self, model_id: str, source: Path, *, optimizer: bool) -> None:
        await self.trained.load(model_id, source, optimizer=optimizer)

    async def drop(self, model_id: str) -> None:
        await self.trained.drop(model_id)

    async def capture(self, model_id: str, version: str) -> None:
        await self._versions.capture(model_id, version)

    async def persist(self, version: str, to: Path) -> int:
        return await self._versions.persist(version, to)

    async def attach(self, version: str, source: Path) -> None:
        await self._versions.attach(version, source)

    async def detach(self, version: str) -> None:
        await self._versions.detach(version)

    async def sample(self, request: SampleRequest, heard: Heard | None = None) -> Sampled:
        if not wire.continues(request, self.card):
            return await self.trained.sample(request, heard)
        if not wire.asks_prompt(request):
            return await self._draw(request, heard)
        asking = asyncio.create_task(self.trained.sample(wire.about_prompt(request)))
        try:
            drawn, asked = await self._draw(request, heard), await asking
        finally:
            asking.cancel()
        return replace(asked, sequences=drawn.sequences, prompt_cache_hit_tokens=drawn.prompt_cache_hit_tokens)

    async def cancel(self, request_id: str) -> None:
        if (task := self._running.get(request_id)) is not None:
            task.cancel()
        await self.trained.cancel(request_id)

    async def close(self) -> None:
        """End both processes."""
        await asyncio.gather(self.server.close(), self.trained.close())
        await self._client.aclose()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _draw(self, request: SampleRequest, heard: Heard | None) -> Sampled:
        """In a task of its own, which `cancel` ends; hanging up is what makes vLLM stop."""
        task = asyncio.create_task(self._ask(request, heard))
        self._running[request.request_id] = task
        try:
            await asyncio.wait([task])
        finally:
            task.cancel()
            del self._running[request.request_id]
        if task.cancelled():
            raise Gone(f"Request {request.request_id} was cancelled.", "Submit it again.")
        return task.result()

    async def _ask(self, request: SampleRequest, heard: Heard | None) -> Sampled:
        if request.version is None and self.card.device != "cpu":
            return await self._posted(request, BASE, heard)
        async with self._versions.lent(request.version or PLAIN) as name:
            return await self._posted(request, name, heard)

    async def _posted(self, request: SampleRequest, name: str, heard: Heard | None) -> Sampled:
        await self.server.up.wait()
        body = wire.body_of(request, self.card, name, stream=heard is not None)
        url, answers = f"{self.server.url}/v1/completions", wire.Answers(request)
        try:
            if heard is None:
                answer = await self._client.post(url, json=body)
                _check(answer.status_code, answer.text)
                answers.take(answer.json())
            else:
                await self._stream(url, body, answers, heard)
        except httpx.TransportError as error:
            raise await self.server.hung_up() from error
        return answers.sampled()

    async def _stream(self, url: str, body: dict[str, Any], answers: wire.Answers, heard: Heard) -> None:
        async with self._client.stream("POST", url, json=body) as stream:
            if stream.status_code != 200:
                _check(stream.status_code, (await stream.aread()).decode(errors="replace"))
            async for line in stream.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                part = json.loads(line.removeprefix("data: "))
                if "error" in part:
                    raise EngineError(f"vLLM failed: {part['error']}", "See its log.")
                for piece in answers.take(part):
                    heard(piece)


def _check(status: int, text: str) -> None:
    if status == 404:  # the adapter was loaded into a vLLM that has ended since
        raise EngineDied("vLLM was started again in the meantime.", "Submit once more.")
    if status != 200:
        raise EngineError(f"vLLM answers with {status}: {text[:500]}", "See its log.")
