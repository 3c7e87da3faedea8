"""Pools over fake engines in this process, whose samples wait at a gate and whose deaths are commands."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np

from tinsmith.engine.base import LoraSpec, OnDelta, SampleRequest, SampleResult, SequenceDelta
from tinsmith.engine.cluster.pool import SamplerPool
from tinsmith.engine.cluster.replica import Launch, SamplerProcess
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.fake.engine import FakeEngine
from tinsmith.errors import EngineDied

CONFIG = EngineConfig(source="toy", kind="fake")


def in_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """A test that is a coroutine, as a function that runs it in an event loop of its own."""

    @functools.wraps(test)
    def run(*args: Any, **fixtures: Any) -> None:
        async def within() -> None:
            async with asyncio.timeout(240):
                await test(*args, **fixtures)

        asyncio.run(within())

    return run


class FakeProcess:
    """A fake engine as a process: `gate` holds samples before their first token, `hold` after it."""

    def __init__(self) -> None:
        self.engine = FakeEngine(CONFIG)
        self.died, self.gate, self.hold = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.gate.set()
        self.hold.set()
        self.pid = 1
        self.from_outside = True
        self.requests: list[SampleRequest] = []
        self.calls: list[tuple[str, Any]] = []
        self.cancelled: list[str] = []

    def die(self, *, from_outside: bool = True) -> None:
        self.from_outside = from_outside
        self.died.set()

    async def attach(self, version: str, source: Path) -> None:
        self.calls.append(("attach", version))
        await self.engine.attach(version, source)

    async def detach(self, version: str) -> None:
        self.calls.append(("detach", version))
        await self.engine.detach(version)

    async def sample(self, request: SampleRequest, on_delta: OnDelta | None = None) -> SampleResult:
        self.requests.append(request)
        await self._until(self.gate)
        deltas: list[SequenceDelta] = []
        result = await self.engine.sample(request, deltas.append)
        for index, delta in enumerate(deltas):
            if on_delta is not None:
                on_delta(delta)
            if index == 0:
                await self._until(self.hold)
        return result

    async def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    async def release_memory(self) -> None:
        self.calls.append(("release_memory", None))

    async def close(self) -> None:
        self.died.set()

    async def _until(self, event: asyncio.Event) -> None:
        waits = [asyncio.create_task(each.wait()) for each in (event, self.died)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if self.died.is_set():
            raise EngineDied("The process has ended.", from_outside=self.from_outside)


class Slots:
    """Launches of fake processes; `processes[index]` are those of a replica, the current one last."""

    def __init__(self, count: int) -> None:
        self.processes: list[list[FakeProcess]] = [[] for _ in range(count)]
        self.may_start = asyncio.Event()
        self.may_start.set()

    def launches(self) -> list[Launch]:
        return [lambda index=index: self._launch(index) for index in range(len(self.processes))]

    def __getitem__(self, index: int) -> FakeProcess:
        return self.processes[index][-1]

    async def _launch(self, index: int) -> SamplerProcess:
        await self.may_start.wait()
        process = FakeProcess()
        self.processes[index].append(process)

        async def ended() -> str:
            await process.died.wait()
            return "killed by the test"

        return SamplerProcess(engine=process, ended=ended)


async def trainer_with(model_id: str) -> FakeEngine:
    """A fake engine with a model."""
    trainer = FakeEngine(CONFIG)
    await trainer.create(model_id, LoraSpec(rank=2, seed=0))
    return trainer


async def pool_of(count: int) -> tuple[SamplerPool, Slots, FakeEngine]:
    """A pool, its processes, and its trainer with the model `m`."""
    slots, trainer = Slots(count), await trainer_with("m")
    return await SamplerPool.start(slots.launches(), trainer=trainer), slots, trainer


def request_of(number: int, length: int = 128, **options: Any) -> SampleRequest:
    """A request whose prompt is that number, over and over."""
    prompt = np.full(length, number % 500, np.int32)
    return SampleRequest(**{"request_id": f"r{number}", "prompt": prompt, "max_tokens": 4, "seed": number, **options})
