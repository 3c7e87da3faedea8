"""A vLLM server as a replica of a pool: the program of `python -m tinsmith.engine.vllm.worker`, without torch.

It starts vLLM on its own machine and answers the calls of a pool, as an engine does in `cluster.worker`. It ends when
vLLM ends, so that the pool gives its requests to another replica and starts it again.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tinsmith.engine.adapters.cached_engine import with_objects
from tinsmith.engine.base import ModelCard
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.process_end import ProcessEnd
from tinsmith.engine.processes.worker import answer_calls, open_link
from tinsmith.engine.vllm.sampler import ZERO_ADAPTER, VllmSampler
from tinsmith.errors import TinsmithError

EXIT_CODE = 70
"""Of a worker whose vLLM has ended, unless someone ended it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmStart:
    """The first message to a worker."""

    config: EngineConfig
    card: ModelCard
    zero_adapter: Mapping[str, bytes]
    """Files of an adapter that changes nothing, which a vLLM on a CPU needs; empty on a GPU."""


async def _serve() -> None:
    link, payload = open_link()
    start: VllmStart = link.receive()
    link.progress = lambda: int(time.monotonic())  # the start of vLLM has a time limit of its own
    sampler = VllmSampler(start.config, start.card)
    link.on_end = lambda: shutil.rmtree(sampler.folder, ignore_errors=True)
    try:
        await sampler.server.start()
        sampler.server.on_end = lambda end: _exit(end, sampler.folder)
        if start.zero_adapter:
            await sampler.attach(ZERO_ADAPTER, _written(start.zero_adapter, sampler.folder / ZERO_ADAPTER))
        engine = with_objects(lambda _: sampler, payload)(start)
    except TinsmithError as error:
        await sampler.close()
        link.send(error)
        await asyncio.to_thread(link.receive)  # the pool has the error now, and closes the connection
        return
    link.send(sampler.card)
    await answer_calls(engine, link)


def _exit(end: ProcessEnd, folder: Path) -> None:
    """End this process without a reply to any call: the pool moves the requests. The exit status shows whether
    one of them may have ended vLLM."""
    shutil.rmtree(folder, ignore_errors=True)
    if end.from_outside:
        os.kill(os.getpid(), signal.SIGTERM)
    os._exit(EXIT_CODE)


def _written(files: Mapping[str, bytes], folder: Path) -> Path:
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def main() -> None:
    """Entry point of the process."""
    asyncio.run(_serve())


if __name__ == "__main__":
    main()
