"""A vLLM server as a sampler replica: the program of `python -m tinsmith.engine.cluster.vllm_worker`, without torch.

It starts vLLM on its own machine and answers the calls of a pool, as an engine does in `cluster.worker`. It ends when
vLLM ends, so that the pool gives its requests to another replica and starts it again.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from typing_extensions import override

from tinsmith.engine.base import ModelCard, OnDelta, SampleRequest, SampleResult
from tinsmith.engine.cluster.files.cached_engine import with_objects
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.processes.worker import ParentLink, answer_calls, open_link
from tinsmith.engine.vllm.sampler import ZERO_ADAPTER, VllmSampler
from tinsmith.engine.vllm.server import EXIT_NOTICE_S
from tinsmith.errors import EngineDied, EngineError, TinsmithError

T = TypeVar("T")
EXIT_CODE = 70
"""Of a worker whose vLLM has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmStart:
    """The first message to a worker."""

    config: EngineConfig
    card: ModelCard
    zero_adapter: Mapping[str, bytes]
    """Files of an adapter that changes nothing, which a vLLM on a CPU needs; empty on a GPU."""


class ReplicaSampler(VllmSampler):
    """A sampler whose versions are folders, loaded at once: the pool attaches a version right before its samples."""

    def __init__(self, start: VllmStart) -> None:
        super().__init__(FolderVersions(), start.config, start.card, restarts=False)

    @override
    async def attach(self, version: str, source: Path) -> None:
        await self._or_end(self._attach(version, source))

    @override
    async def sample(self, request: SampleRequest, on_delta: OnDelta | None = None) -> SampleResult:
        return await self._or_end(super().sample(request, on_delta))

    async def _attach(self, version: str, source: Path) -> None:
        await super().attach(version, source)
        async with self.versions.loaded(version):
            pass

    async def _or_end(self, call: Awaitable[T]) -> T:
        """The result of a call. If vLLM ends, so does this process, without a reply: the pool moves the request."""
        try:
            return await call
        except EngineDied:
            with suppress(TimeoutError):
                async with asyncio.timeout(EXIT_NOTICE_S):
                    await self.server.ended.wait()
                await asyncio.Event().wait()
            raise


class FolderVersions:
    """Holder of versions that are folders only."""

    async def attach(self, version: str, source: Path) -> None:
        pass

    async def detach(self, version: str) -> None:
        pass

    async def capture(self, model_id: str, version: str) -> None:
        raise EngineError(f"A sampler replica has no model {model_id} to capture {version} from.")

    async def persist(self, version: str, to: Path) -> int:
        raise EngineError(f"A sampler replica does not write {version} to {to}.")


async def _serve(link: ParentLink, payload: bytes) -> None:
    start: VllmStart = link.receive()
    link.progress = lambda: int(time.monotonic())  # the start of vLLM has a time limit of its own
    sampler = ReplicaSampler(start)
    link.on_end = lambda: shutil.rmtree(sampler.folder, ignore_errors=True)
    try:
        await sampler.server.start()
        if start.zero_adapter:
            await sampler.attach(ZERO_ADAPTER, _written(start.zero_adapter, sampler.folder / ZERO_ADAPTER))
        engine = with_objects(lambda _: sampler, payload)(start)
    except TinsmithError as error:
        await sampler.close()
        link.send(error)
        await asyncio.to_thread(link.receive)  # the pool has the error now, and closes the connection
        return
    link.send(sampler.card)
    answering = asyncio.create_task(answer_calls(engine, link))
    await sampler.server.ended.wait()
    answering.cancel()
    link.on_end()
    os._exit(EXIT_CODE)


def _written(files: Mapping[str, bytes], folder: Path) -> Path:
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def main() -> None:
    """Entry point of the process."""
    asyncio.run(_serve(*open_link()))


if __name__ == "__main__":
    main()
