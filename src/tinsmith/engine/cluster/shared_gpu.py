"""A trainer and a vLLM on one GPU: room for the start of vLLM and, in sleep mode, turns of both.

A vLLM that sleeps has its memory on the GPU while it starts, loads an adapter or samples, and the trainer while it runs
passes or samples; `MemoryTurns` decides who has it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from typing_extensions import override

from tinsmith.engine.base import AdamParams, OnDelta, Pass, PassResult, SampleRequest, SampleResult
from tinsmith.engine.cluster.replica import Launch, SamplerProcess
from tinsmith.engine.device_sharing import MemoryTurns, SharingPolicy, Workload
from tinsmith.engine.interface import Engine
from tinsmith.engine.processes.rpc import DelegatingEngine
from tinsmith.engine.training.model_locks import ModelLocks
from tinsmith.engine.vllm.sampler import VllmSampler
from tinsmith.errors import TinsmithError

log = logging.getLogger(__name__)

RELEASE_S = 10.0
"""Time for the trainer to give back memory: it does so between two micro-batches."""


class SharedGpu:
    """The GPU of a trainer process and of the vLLM beside it."""

    def __init__(self, release_memory: Callable[[], Awaitable[None]], policy: SharingPolicy | None) -> None:
        """`release_memory`: of the trainer. `policy`: of the turns; None for a vLLM that never sleeps."""
        self._release_memory = release_memory
        self._turns = None if policy is None else MemoryTurns(self._hand_over, policy)
        self._vllm: SamplerProcess | None = None

    def trainer(self, engine: Engine) -> Engine:
        """The trainer, which computes in its turns only."""
        return engine if self._turns is None else _TrainerInTurns(engine, self._turns)

    def launch(self, launch: Launch) -> Launch:
        """The launch of vLLM, for which the trainer makes room in a turn of vLLM."""

        async def launch_in_turn() -> SamplerProcess:
            if self._turns is None:
                await self._make_room()
                return await launch()
            async with self._turns.turn("sampling"):
                await self._make_room()
                self._vllm = await launch()
            self._vllm.turns = self._turns
            return self._vllm

        return launch_in_turn

    async def close(self) -> None:
        """Hand the GPU over no more; what waits for a turn fails."""
        if self._turns is not None:
            await self._turns.close()

    async def _hand_over(self, workload: Workload) -> None:
        """Free the memory of one for the other. A vLLM that fails to is killed, which frees it too."""
        if workload == "sampling":
            await self._make_room()
        if self._vllm is not None:
            with suppress(TinsmithError):
                await self._vllm.engine.call(VllmSampler.sleep if workload == "training" else VllmSampler.wake_up)

    async def _make_room(self) -> None:
        """Let the trainer give back what it does not need; within RELEASE_S, for it may be at work."""
        try:
            async with asyncio.timeout(RELEASE_S):
                await self._release_memory()
        except (TinsmithError, TimeoutError) as error:
            log.warning("The trainer keeps its caches while vLLM starts or wakes up: %s", error or "it is busy")


class _TrainerInTurns(DelegatingEngine):
    """Implements `engine.interface.Engine`."""

    def __init__(self, engine: Engine, turns: MemoryTurns) -> None:
        super().__init__(engine)
        self._turns = turns
        self._locks = ModelLocks()

    @override
    async def run(self, passes: Sequence[Pass]) -> list[PassResult | TinsmithError]:
        models = (request.model_id for request in passes)
        async with self._locks.of_all(models), self._turns.turn("training"):
            return await self._engine.run(passes)

    @override
    async def step(self, model_id: str, adam: AdamParams) -> dict[str, float]:
        async with self._locks.of(model_id):  # it needs no turn, but passes before it may wait for theirs
            return await self._engine.step(model_id, adam)

    @override
    async def sample(self, request: SampleRequest, on_delta: OnDelta | None = None) -> SampleResult:
        async with self._turns.turn("training"):
            return await self._engine.sample(request, on_delta)
