"""Adapter versions for a vLLM: copied into folders of ours when first sampled from, loaded under names, unloaded.

The trainer's engine holds every version and answers for it. What is here are copies: a folder per version that is in
use, linked to the checkpoint where there is one, so that deleting that takes nothing from samples under way. Each load
has a name of its own, so that a version made anew is never taken for the old one.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tinsmith.atomic import link_folder
from tinsmith.engine.base import Engine
from tinsmith.engine.vllm.server import RESIDENT, VllmServer
from tinsmith.errors import EngineDied, EngineError, Gone, Unsupported

_ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
"""The files that vLLM reads, and that a version for sampling has."""


@dataclass(eq=False, slots=True)
class _Version:
    """`kept`: the checkpoint, once there is one; `copy`: our folder; `name`: in the vLLM that came up as `start`."""

    kept: Path | None = None
    copy: Path | None = None
    name: str = ""
    start: int = 0
    rank: int = 0
    users: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class VllmVersions:
    """By name, most recently used last."""

    def __init__(self, source: Engine, server: VllmServer, client: httpx.AsyncClient, rank: int, folder: Path) -> None:
        self._source, self._server, self._client = source, server, client
        self._rank, self._folder = rank, folder
        self._known: dict[str, _Version] = {}
        self._numbers = itertools.count(1)

    async def capture(self, model_id: str, version: str) -> None:
        await self._source.capture(model_id, version)
        await self._replace(version, _Version())

    async def attach(self, version: str, folder: Path) -> None:
        await self._source.attach(version, folder)
        await self._replace(version, _Version(kept=folder))

    async def detach(self, version: str) -> None:
        await self._source.detach(version)
        await self._replace(version, None)

    async def persist(self, version: str, to: Path) -> int:
        """The source can write a captured version once; where our copy was that, its files are what is kept."""
        one = self._get(version)
        async with one.lock:
            if one.copy is not None and one.kept is None:
                size = await asyncio.to_thread(link_folder, one.copy, to, *_ADAPTER)
                await self._source.attach(version, to)
            else:
                size = await self._source.persist(version, to)
            one.kept = to
        return size

    @asynccontextmanager
    async def lent(self, version: str) -> AsyncIterator[str]:
        """What vLLM calls it, loaded and not unloaded before the block ends.

        Raises Gone for versions that are not known, Unsupported for ranks beyond what vLLM was started for.
        """
        one = self._get(version)
        one.users += 1
        try:
            async with one.lock:
                await self._copy(version, one)
                self.check(f"Version '{version}'", one.rank)
                await self._load(one)
            yield one.name
        finally:
            one.users -= 1
            await self._tidy(one, forgotten=self._known.get(version) is not one)

    def check(self, what: str, rank: int) -> None:
        """Raises Unsupported for a rank that vLLM has set no memory aside for."""
        if rank > self._rank:
            raise Unsupported(
                f"{what} has rank {rank}; vLLM, which samples here, was started for at most {self._rank}.",
                f"Serve with vllm.rank={rank} or more, or give a rank up to {self._rank}.",
            )

    async def _replace(self, version: str, new: _Version | None) -> None:
        old = self._known.pop(version, None)
        if new is not None:
            self._known[version] = new
        if old is not None:
            await self._tidy(old, forgotten=True)

    def _get(self, version: str) -> _Version:
        if version not in self._known:
            raise Gone(f"The engine holds no version '{version}'.", "Save the weights again.")
        self._known[version] = one = self._known.pop(version)
        return one

    async def _copy(self, version: str, one: _Version) -> None:
        if one.copy is not None:
            return
        to = self._folder / f"adapter-{next(self._numbers)}"
        try:
            if one.kept is None:
                await self._source.persist(version, to)
            else:
                await asyncio.to_thread(link_folder, one.kept, to, *_ADAPTER)
            one.rank = int(json.loads((to / "adapter_config.json").read_text())["r"])
        except (OSError, ValueError, KeyError) as error:
            raise Gone(f"The files of version '{version}' are no longer there: {error}", "Save it again.") from error
        one.copy = to

    async def _load(self, one: _Version) -> None:
        await self._server.up.wait()
        if one.start == self._server.starts:
            return
        start, name = self._server.starts, f"v{next(self._numbers)}"
        answer = await self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(one.copy)})
        if answer.status_code != 200:
            raise EngineError(f"vLLM does not load the adapter: {answer.text[:500]}", "See its log.")
        one.name, one.start = name, start

    async def _tidy(self, one: _Version, *, forgotten: bool) -> None:
        """What is forgotten goes once nobody uses it; of the others the least recently used, beyond a number."""
        if forgotten and one.users == 0:
            await self._drop(one, files=True)
        resident = [other for other in self._known.values() if other.start == self._server.starts]
        idle = [other for other in resident if other.users == 0]
        for other in idle[: max(0, len(resident) - RESIDENT)]:
            await self._drop(other, files=other.kept is not None)

    async def _drop(self, one: _Version, *, files: bool) -> None:
        """Out of vLLM's memory, and with `files` our copy too: without a checkpoint it may be the only one."""
        async with one.lock:
            if one.users:
                return
            if one.start == self._server.starts and self._server.up.is_set():
                with suppress(EngineDied):
                    await self._post("/v1/unload_lora_adapter", {"lora_name": one.name})
            one.start = 0
            if files and one.copy is not None:
                copy, one.copy = one.copy, None
                await asyncio.to_thread(shutil.rmtree, copy, ignore_errors=True)

    async def _post(self, path: str, body: dict[str, str]) -> httpx.Response:
        try:
            return await self._client.post(self._server.url + path, json=body)
        except httpx.TransportError as error:
            raise await self._server.hung_up() from error
