"""An engine in a process of its own: answers, errors, death."""

import asyncio
import os
import signal

import numpy as np
import pytest

from tinsmith.engine.base import AdamParams, LoraSpec, SampleRequest
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.process import RemoteEngine
from tinsmith.errors import ConfigError, EngineDied, TinsmithError

FAKE = EngineConfig(kind="fake", source="fake")


def ask(number: int) -> SampleRequest:
    return SampleRequest(request_id=f"r{number}", prompt=np.array([1, 2, 3], np.int32), max_tokens=5, seed=number)


def test_calls_are_answered_and_errors_keep_their_kind() -> None:
    async def run() -> None:
        engine = await RemoteEngine.start(FAKE)
        try:
            assert engine.card.source == "fake"
            await engine.create("m", LoraSpec(rank=4, seed=0))
            assert "grad_norm" in await engine.step("m", AdamParams())
            answers = await asyncio.gather(*(engine.sample(ask(number)) for number in range(20)))
            assert all(len(answer.sequences[0].tokens) > 0 for answer in answers)
            with pytest.raises(TinsmithError, match="nobody"):
                await engine.step("nobody", AdamParams())
        finally:
            await engine.close()

    asyncio.run(run())


def test_a_killed_engine_ends_every_call_and_says_so() -> None:
    async def run() -> None:
        engine = await RemoteEngine.start(FAKE)
        os.kill(engine.pid, signal.SIGKILL)
        await asyncio.wait_for(engine.died.wait(), 10)
        with pytest.raises(EngineDied):
            await engine.sample(ask(0))
        await engine.close()

    asyncio.run(run())


def test_a_model_that_is_not_there_is_told_while_starting() -> None:
    with pytest.raises(ConfigError, match="no folder"):
        asyncio.run(RemoteEngine.start(EngineConfig(source="/no/such/folder")))
