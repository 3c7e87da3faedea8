"""Adapter versions in a vLLM: copied to folders when first sampled from, loaded under their own names, unloaded.

The training engine holds every version and is the authority on them. This module manages copies: one folder for each
version in use, hard-linked to its checkpoint where there is one, so that deleting the checkpoint does not disturb
running samples. Each load has a new name, so that a version which was replaced is never mistaken for the old one.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import httpx
from safetensors.numpy import load_file, save_file

from tinsmith.atomic import link_folder
from tinsmith.engine.lora.peft_settings import read_settings
from tinsmith.engine.lora.saved_spec import PREFIX
from tinsmith.engine.vllm.server import MAX_RESIDENT, VllmServer
from tinsmith.errors import EngineDied, Gone, Unsupported

_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
"""The files that vLLM reads, which are all files of a version for sampling."""


@dataclass(eq=False, slots=True)
class _Version:
    """Where a version's files are, and under which name vLLM has it."""

    checkpoint: Path | None = None
    """The persisted version, once there is one."""
    folder: Path | None = None
    """The copy that vLLM reads."""
    scaled: Path | None = None
    """What vLLM reads instead, where modules have several values of alpha / rank."""
    lora_name: str = ""
    server_start: int = 0
    """Which start of vLLM has it loaded; 0: none."""
    rank: int = 0
    users: int = 0
    """Requests that sample from it now."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class VersionHolder(Protocol):
    """What has every version: a training engine, or nobody where all versions are folders."""

    async def capture(self, model_id: str, version: str) -> None:
        """Freeze a model's weights as a version."""
        ...

    async def persist(self, version: str, to: Path) -> int:
        """Write a version as a folder; returns its bytes."""
        ...

    async def attach(self, version: str, source: Path) -> None:
        """Register a folder as a version."""
        ...

    async def detach(self, version: str) -> None:
        """Delete a version."""
        ...


def check_rank(subject: str, rank: int, max_rank: int) -> None:
    """Raises Unsupported for a rank for which a vLLM has reserved no memory."""
    if rank > max_rank:
        raise Unsupported(
            f"{subject} has rank {rank}, but vLLM, which samples here, was started for ranks up to {max_rank}.",
            f"Serve with vllm.rank={rank} or more, or use a rank up to {max_rank}.",
        )


def with_one_scale(folder: Path) -> Path | None:
    """Write an adapter whose modules have several scales with lora_alpha / r for all of them, as vLLM applies it, into
    a folder within its own. None if all have that scale."""
    config = json.loads((folder / "adapter_config.json").read_text())
    settings = read_settings(config, folder)
    if settings.has_plain_scale:
        return None
    tensors, scale, is_plain = load_file(folder / "adapter_model.safetensors"), settings.alpha / settings.rank, True
    for name, matrix in tensors.items():
        module, _, side = name.removeprefix(PREFIX).rpartition(".lora_")
        factor = settings.alpha_of(module) / settings.rank_of(module) / scale
        if side == "B.weight" and not math.isclose(factor, 1, rel_tol=1e-12):
            tensors[name], is_plain = matrix * matrix.dtype.type(factor), False
    if is_plain:
        return None
    scaled = folder / "scaled"
    scaled.mkdir(exist_ok=True)
    save_file(tensors, scaled / "adapter_model.safetensors", metadata={"format": "pt"})
    (scaled / "adapter_config.json").write_text(json.dumps({**config, "alpha_pattern": {}}))
    return scaled


class VllmVersions:
    """Versions by name, most recently used last."""

    def __init__(
        self, holder: VersionHolder, server: VllmServer, client: httpx.AsyncClient, max_rank: int, folder: Path
    ) -> None:
        self._holder, self._server, self._client = holder, server, client
        self._max_rank, self._folder = max_rank, folder
        self._versions: dict[str, _Version] = {}
        self._numbers = itertools.count(1)

    async def capture(self, model_id: str, name: str) -> None:
        await self._holder.capture(model_id, name)
        await self._replace(name, _Version())

    async def attach(self, name: str, checkpoint: Path) -> None:
        await self._holder.attach(name, checkpoint)
        await self._replace(name, _Version(checkpoint=checkpoint))

    async def detach(self, name: str) -> None:
        await self._holder.detach(name)
        await self._replace(name, None)

    async def persist(self, name: str, to: Path) -> int:
        """Write a captured version; returns its bytes.

        The trainer can write a version once only, so if that was for vLLM's copy, the copy is linked.
        """
        version = self._get(name)
        async with version.lock:
            if version.folder is not None and version.checkpoint is None:
                size = await asyncio.to_thread(link_folder, version.folder, to, *_ADAPTER_FILES)
                await self._holder.attach(name, to)
            else:
                size = await self._holder.persist(name, to)
            version.checkpoint = to
        return size

    @asynccontextmanager
    async def loaded(self, name: str) -> AsyncIterator[str]:
        """The name by which vLLM knows a version, which stays loaded until the block ends.

        Raises Gone for an unknown version, Unsupported for a rank above vLLM's limit.
        """
        version = self._get(name)
        version.users += 1
        try:
            async with version.lock:
                await self._copy(name, version)
                self.check_rank(f"Version '{name}'", version.rank)
                await self._load(version)
            yield version.lora_name
        finally:
            version.users -= 1
            await self._evict(version, replaced=self._versions.get(name) is not version)

    def check_rank(self, subject: str, rank: int) -> None:
        """Raises Unsupported for a rank for which vLLM has reserved no memory."""
        check_rank(subject, rank, self._max_rank)

    async def _replace(self, name: str, new: _Version | None) -> None:
        old = self._versions.pop(name, None)
        if new is not None:
            self._versions[name] = new
        if old is not None:
            await self._evict(old, replaced=True)

    def _get(self, name: str) -> _Version:
        if name not in self._versions:
            raise Gone(f"The engine has no version '{name}'.", "Save the weights again.")
        self._versions[name] = version = self._versions.pop(name)
        return version

    async def _copy(self, name: str, version: _Version) -> None:
        if version.folder is not None:
            return
        to = self._folder / f"adapter-{next(self._numbers)}"
        try:
            if version.checkpoint is None:
                await self._holder.persist(name, to)
            else:
                await asyncio.to_thread(link_folder, version.checkpoint, to, *_ADAPTER_FILES)
            version.rank = int(json.loads((to / "adapter_config.json").read_text())["r"])
            version.scaled = await asyncio.to_thread(with_one_scale, to)
        except (OSError, ValueError, KeyError) as error:
            raise Gone(f"The files of version '{name}' are no longer there: {error}", "Save it again.") from error
        version.folder = to

    async def _load(self, version: _Version) -> None:
        await self._server.wait_until_up()
        while version.server_start != self._server.starts:
            async with self._server.turn():  # vLLM copies the matrices to the GPU
                if self._server.up.is_set():
                    await self._load_now(version)
            await self._server.wait_until_up()

    async def _load_now(self, version: _Version) -> None:
        start, lora_name = self._server.starts, f"v{next(self._numbers)}"
        body = {"lora_name": lora_name, "lora_path": str(version.scaled or version.folder)}
        response = await self._post("/v1/load_lora_adapter", body)
        if response.status_code != 200:
            raise await self._server.request_failed(start, f"vLLM does not load the adapter: {response.text[:500]}")
        version.lora_name, version.server_start = lora_name, start

    async def _evict(self, version: _Version, *, replaced: bool) -> None:
        """Unload a replaced version once it has no users, and the least recently used versions above the limit."""
        if replaced and version.users == 0:
            await self._unload(version, delete=True)
        resident = [other for other in self._versions.values() if other.server_start == self._server.starts]
        idle = [other for other in resident if other.users == 0]
        for other in idle[: max(0, len(resident) - MAX_RESIDENT)]:
            await self._unload(other, delete=other.checkpoint is not None)

    async def _unload(self, version: _Version, *, delete: bool) -> None:
        """Remove from vLLM's memory, and with `delete` the copy too: without a checkpoint it may be the only one."""
        async with version.lock:
            if version.users:
                return
            if version.server_start == self._server.starts and self._server.up.is_set():
                with suppress(EngineDied):
                    await self._post("/v1/unload_lora_adapter", {"lora_name": version.lora_name})
            version.server_start = 0
            if delete and version.folder is not None:
                folder, version.folder = version.folder, None
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def _post(self, path: str, body: dict[str, str]) -> httpx.Response:
        """Raises EngineDied if vLLM ends; it is killed if it does not answer."""
        start = self._server.starts
        try:
            with self._server.answered_in_time(f"{path} ({body['lora_name']})"):
                return await self._client.post(self._server.url + path, json=body)
        except httpx.TransportError as error:
            raise await self._server.connection_lost(start) from error
