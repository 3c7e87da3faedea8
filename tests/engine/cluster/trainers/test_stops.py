"""A rank that is stopped, as on a machine that froze."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tests.engine.cluster.trainers.test_processes import group_of
from tests.engine.data import pass_for
from tinsmith.engine.base import LoraSpec
from tinsmith.errors import EngineDied

pytestmark = pytest.mark.cluster


def test_stopped_rank_counts_as_stalled(tiny_llama: Path):
    async def stop() -> None:
        async with group_of(tiny_llama) as group:
            await group.create("a", LoraSpec(rank=4, seed=1))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(group.stalled(2), 4)
            os.kill(group.pids[1], signal.SIGSTOP)
            running = asyncio.create_task(group.run([pass_for("ppo", "a", lengths=(30, 30))]))
            group.kill(await asyncio.wait_for(group.stalled(2), 10))
            with pytest.raises(EngineDied, match="no heartbeat"):
                await running
            await asyncio.wait_for(group.died.wait(), 10)

    asyncio.run(stop())
