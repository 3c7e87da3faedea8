"""Adapter versions in a vLLM: folders of their own, loaded when they are attached, and again once they were unloaded.

A folder is hard-linked, so that deleting a checkpoint does not disturb running samples, and each has a name of its own,
so that a version which was replaced is never mistaken for the old one.
"""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from safetensors.numpy import load_file, save_file

from tinsmith.atomic import link_folder
from tinsmith.engine.adapters.versions import Version, VersionTable
from tinsmith.engine.lora.peft_settings import read_settings
from tinsmith.engine.lora.saved_spec import PREFIX
from tinsmith.engine.vllm.client import VllmClient
from tinsmith.engine.vllm.server import MAX_RESIDENT, VllmServer
from tinsmith.errors import EngineDied, Gone, Unsupported

_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
"""The files that vLLM reads, which are all files of a version for sampling."""


@dataclass(eq=False, slots=True)
class LinkedVersion(Version):
    """Where a version's files are, and under which name vLLM has it."""

    source: Path = Path()
    folder: Path | None = None
    """The links that vLLM reads."""
    scaled: Path | None = None
    """What vLLM reads instead, where modules have several values of alpha / rank."""
    lora_name: str = ""
    """Empty while it is not loaded."""
    rank: int = 0
    users: int = 0
    """Requests that sample from it now."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


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
    """The versions that a vLLM samples from."""

    def __init__(self, server: VllmServer, client: VllmClient, max_rank: int, folder: Path) -> None:
        """`folder`: for links to the files of versions."""
        self._server, self._client = server, client
        self._max_rank, self._folder = max_rank, folder
        self._versions = VersionTable[LinkedVersion]()

    async def attach(self, name: str, source: Path) -> None:
        """Register an adapter folder as a version and load it."""
        await self.detach(name)
        self._versions.put(name, LinkedVersion(source=source))
        async with self.loaded(name):
            pass

    async def detach(self, name: str) -> None:
        """Delete a version; unknown names are ignored."""
        version = self._versions.remove(name)
        if version is not None and not version.users:
            await self._unload(version)

    @asynccontextmanager
    async def loaded(self, name: str) -> AsyncIterator[str]:
        """The name by which vLLM knows a version, which stays loaded until the block ends.

        Raises Gone for an unknown version, Unsupported for a rank above vLLM's limit.
        """
        version = self._versions.use(name)
        version.users += 1
        try:
            async with version.lock:
                await self._link(name, version)
                check_rank(f"Version '{name}'", version.rank, self._max_rank)
                if not version.lora_name:
                    await self._load(version)
            yield version.lora_name
        finally:
            version.users -= 1
            if not version.users and self._versions.find(name) is not version:
                await self._unload(version)
            await self._evict()

    async def _link(self, name: str, version: LinkedVersion) -> None:
        if version.folder is not None:
            return
        to = self._folder / f"adapter-{version.number}"
        try:
            await asyncio.to_thread(link_folder, version.source, to, *_ADAPTER_FILES)
            version.rank = int(json.loads((to / "adapter_config.json").read_text())["r"])
            version.scaled = await asyncio.to_thread(with_one_scale, to)
        except (OSError, ValueError, KeyError) as error:
            raise Gone(f"The files of version '{name}' are no longer there: {error}", "Save it again.") from error
        version.folder = to

    async def _load(self, version: LinkedVersion) -> None:
        assert version.folder is not None
        lora_name = f"{self._server.name}-{version.number}"
        await self._client.load_adapter(lora_name, version.scaled or version.folder)
        version.lora_name = lora_name

    async def _evict(self) -> None:
        """Unload the least recently used versions above the limit."""
        resident = [version for version in self._versions if version.lora_name]
        idle = [version for version in resident if version.users == 0]
        for version in idle[: max(0, len(resident) - MAX_RESIDENT)]:
            await self._unload(version)

    async def _unload(self, version: LinkedVersion) -> None:
        """Remove a version that nobody uses from vLLM's memory, and its links."""
        async with version.lock:
            if version.users:
                return
            if version.lora_name:
                lora_name, version.lora_name = version.lora_name, ""
                with suppress(EngineDied):
                    await self._client.unload_adapter(lora_name)
            if version.folder is not None:
                folder, version.folder = version.folder, None
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
