"""Kills of an engine process from outside fail no request."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

import pytest

from tests.service.engines.running import host_of, pid_of, started, training
from tests.service.support.inprocess import api
from tests.service.support.process import separate

pytestmark = pytest.mark.usefixtures("forked_programs")


def test_kills_from_outside_fail_no_request(tmp_path: Path) -> None:
    """Ten at random moments; the losses equal those without.

    Fails if `death_points` counts a kill from outside as three deaths count.
    """
    draw = random.Random(1)

    async def main() -> None:
        async with api(tmp_path / "calm") as app:
            expected = await training(app, await app.model(seed=1), 8)
        async with api(tmp_path / "killed", separate, capture_every=3, hold_s=40) as app:
            host, model = host_of(app), await app.model(seed=1)
            work = asyncio.create_task(training(app, model, 8))
            for number in range(10):
                await started(host, number + 1)
                await asyncio.sleep(draw.random() * 0.05)
                os.kill(pid_of(host), signal.SIGKILL)
            assert await work == expected
            await started(host, 11)

    asyncio.run(main())
