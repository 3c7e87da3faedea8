"""A vLLM server as a sampler replica: the program of `python -m tinsmith.engine.cluster.vllm_worker`, without torch.

It starts vLLM on its own machine and answers the calls of a pool, as an engine does in `cluster.worker`. It ends when
vLLM ends, so that the pool gives its requests to another replica and starts it again.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from tinsmith.engine.base import ModelCard, OnDelta, SampleRequest, SampleResult
from tinsmith.engine.cluster.dial import Entrance
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.process import ParentLink, answer_calls
from tinsmith.engine.vllm.sampler import ZERO_ADAPTER, VllmSampler
from tinsmith.engine.vllm.server import EXIT_NOTICE_S
from tinsmith.errors import EngineDied, EngineError, TinsmithError

EXIT_CODE = 70
"""Of a worker whose vLLM has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmStart:
    """The first message to a worker."""

    config: EngineConfig
    card: ModelCard
    zero_adapter: Path | None
    """Folder of an adapter that changes nothing, which a vLLM on a CPU needs; None on a GPU."""


class ReplicaSampler(VllmSampler):
    """A sampler whose versions are folders, loaded at once: the pool attaches a version right before its samples."""

    def __init__(self, start: VllmStart) -> None:
        super().__init__(FolderVersions(), start.config, start.card, restarts=False)

    @override
    async def attach(self, version: str, source: Path) -> None:
        await super().attach(version, source)
        async with self.versions.loaded(version):
            pass

    @override
    async def sample(self, request: SampleRequest, on_delta: OnDelta | None = None) -> SampleResult:
        try:
            return await super().sample(request, on_delta)
        except EngineDied:
            with suppress(
                TimeoutError
            ):  # if vLLM ended, so does this process: no reply, and the pool moves the request
                await asyncio.wait_for(self.server.ended.wait(), EXIT_NOTICE_S)
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


async def _serve(link: ParentLink) -> None:
    start: VllmStart = link.receive()
    link.progress = lambda: int(time.monotonic())  # the start of vLLM has a time limit of its own
    sampler = ReplicaSampler(start)
    link.on_end = lambda: shutil.rmtree(sampler.folder, ignore_errors=True)
    try:
        await sampler.server.start()
        if start.zero_adapter is not None:
            await sampler.attach(ZERO_ADAPTER, start.zero_adapter)
    except TinsmithError as error:
        await sampler.close()
        link.send(error)
        await asyncio.to_thread(link.receive)  # the pool has the error now, and closes the connection
        return
    link.send(sampler.card)
    answering = asyncio.create_task(answer_calls(sampler, link))
    await sampler.server.ended.wait()
    answering.cancel()
    link.on_end()
    os._exit(EXIT_CODE)


def main() -> None:
    """Entry point of the process."""
    entrance = Entrance.open()
    asyncio.run(_serve(ParentLink(entrance.accept())))


if __name__ == "__main__":
    main()
