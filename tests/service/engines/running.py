"""Steps of the tests of engine processes."""

from __future__ import annotations

import asyncio

from tests.service.support.inprocess import Api, loss_in, pass_body
from tinsmith.service.engines.host import EngineHost


def host_of(app: Api) -> EngineHost:
    return app.service.workers["toy"].host


def pid_of(host: EngineHost) -> int:
    assert host._running is not None
    assert host._running.process is not None
    return host._running.process.pid


async def started(host: EngineHost, count: int) -> None:
    """Wait for an engine start."""
    async with asyncio.timeout(240):
        while host.start_count < count or not host.is_up:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def training(app: Api, model: str, steps: int) -> list[float]:
    """The losses of some steps; a failed request fails the test."""
    losses = []
    for step in range(steps):
        seq = 2 * step + 1
        promise = (await app.post("forward_backward", pass_body(model, seq))).json()
        stepped = (await app.post("optim_step", {"model_id": model, "seq_id": seq + 1, "adam_params": {}})).json()
        losses.append(loss_in(await app.result(promise)))
        assert "metrics" in (await app.result(stepped)).json()
    return losses
