"""Calls on a model take effect in their order, also where those before them wait."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from tinsmith.engine.base import AdamParams, Datum, LoraSpec, Pass
from tinsmith.engine.cluster.shared_gpu import SharedGpu
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.device_sharing import POLICIES
from tinsmith.engine.fake.engine import FakeEngine
from tinsmith.engine.training.model_locks import ModelLocks
from tinsmith.errors import EngineError


def passes(*model_ids: str) -> list[Pass]:
    datum = Datum(tokens=np.zeros(4, np.int32), targets=np.zeros(4, np.int64))
    return [Pass(model_id=model_id, data=(datum,), loss_fn="cross_entropy") for model_id in model_ids]


def test_locks_are_taken_in_the_order_of_the_calls() -> None:
    async def main() -> None:
        locks, order = ModelLocks(), []

        async def call(name: str, *model_ids: str) -> None:
            async with locks.of_all(model_ids):
                await asyncio.sleep(0)
                order.append(name)

        await asyncio.gather(call("run", "b", "a", "a"), call("step", "a"), call("other", "c"), call("next", "a"))
        assert [each for each in order if each != "other"] == ["run", "step", "next"]
        assert order.index("other") < order.index("step")

    asyncio.run(main())


def test_step_waits_for_the_passes_of_its_model_alone() -> None:
    """Break it: leave out the lock in `FakeEngine.step`."""

    async def main() -> None:
        engine = FakeEngine(EngineConfig(source="toy", kind="fake"))
        for model_id in "ab":
            await engine.create(model_id, LoraSpec(rank=2, seed=1))
        _, own, other = await asyncio.gather(
            engine.run(passes("a", "a")), engine.step("a", AdamParams()), engine.step("b", AdamParams())
        )
        assert own["grad_norm"] > 0
        assert other["grad_norm"] == 0

    asyncio.run(main())


class Recorder(FakeEngine):
    """Records its calls."""

    def __init__(self) -> None:
        super().__init__(EngineConfig(source="toy", kind="fake"))
        self.calls: list[str] = []

    async def run(self, passes: Sequence[Pass]):
        self.calls.append("run")
        return []

    async def step(self, model_id: str, adam: AdamParams):
        self.calls.append(f"step {model_id}")
        return {}


def test_step_does_not_pass_by_passes_that_wait_for_the_gpu() -> None:
    """Break it: leave out `step` in `_TrainerInTurns`."""

    async def main() -> None:
        engine, gate, launched = Recorder(), asyncio.Event(), asyncio.Event()
        gpu = SharedGpu(engine.release_memory, POLICIES["latency"])
        trainer = gpu.trainer(engine)

        async def launch():
            launched.set()
            await gate.wait()
            raise EngineError("It does not start.")

        starting = asyncio.create_task(gpu.launch(launch)())
        await launched.wait()
        calls = [
            asyncio.create_task(call)
            for call in (trainer.run(passes("a")), trainer.step("a", AdamParams()), trainer.step("b", AdamParams()))
        ]
        await calls[2]
        assert engine.calls == ["step b"]
        gate.set()
        await asyncio.wait([starting, *calls])
        assert engine.calls == ["step b", "run", "step a"]
        assert isinstance(starting.exception(), EngineError)
        await gpu.close()

    asyncio.run(main())
