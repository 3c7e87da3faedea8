"""Front ends that are killed: what they had forwarded takes effect once, and others take their place."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
from pathlib import Path

import httpx
import pytest
import tinker

from tests.service.conftest import datum
from tests.service.support.frontends import COUNT
from tests.service.support.inprocess import KEY, Factory, api, until
from tinsmith.engine.processes.worker import encode
from tinsmith.service.frontends.channel import Channel
from tinsmith.service.frontends.messages import BodyPart, ReadBody

pytestmark = pytest.mark.usefixtures("forked_programs")


def step(model: tinker.TrainingClient) -> float:
    """Loss of a pass whose step is submitted before its result is there."""
    passed = model.forward_backward([datum([5, 6, 7, 8])], "cross_entropy")
    stepped = model.optim_step(tinker.types.AdamParams(learning_rate=0.02))
    stepped.result(240)
    return passed.result(240).metrics["loss:sum"]


def test_killed_front_ends_lose_and_repeat_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails without the loop of `_keep`: nobody answers. Equal losses: each pass and step had its effect once."""
    monkeypatch.setenv(COUNT, "2")
    start = Factory()

    async def wait(call: str, _argument: object) -> None:
        await asyncio.sleep(0.02 if call in ("run", "step") else 0)

    start.hook = wait

    async def main() -> None:
        async with api(tmp_path, start, hold_s=2.0) as app:
            pool = app.pool
            assert pool is not None
            client = tinker.ServiceClient(base_url=str(app.http.base_url), api_key=KEY)
            create = functools.partial(client.create_lora_training_client, "toy", rank=4, seed=1)
            models = [await asyncio.to_thread(lambda: create().result()) for _ in range(2)]
            quiet = [await asyncio.to_thread(step, models[0]) for _ in range(12)]
            killed = set()
            losses = []
            for number in range(12):
                await until(lambda: len(pool.pids) == 2)  # those of the killed ones have started
                running = asyncio.create_task(asyncio.to_thread(step, models[1]))
                if number % 3 == 1:
                    await asyncio.sleep(0.01 * number)
                    killed |= set(pool.pids)
                    for pid in pool.pids:
                        os.kill(pid, signal.SIGKILL)
                losses.append(await running)
            assert len(killed) >= 4
            assert losses == quiet
            await asyncio.to_thread(lambda: client.close("success").result())

    asyncio.run(main())


def test_request_is_accepted_although_its_front_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The core completes what a killed front end has forwarded; the repetition gets the promise of the first."""
    monkeypatch.setenv(COUNT, "1")
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def main() -> None:
        async with api(tmp_path) as app:
            assert app.pool is not None
            model = await app.model()
            accept = app.service.store.accept

            async def slow(*args, **options):
                begun.set()
                await go_on.wait()
                return await accept(*args, **options)

            app.service.store.accept = slow  # type: ignore[method-assign]
            body = {"model_id": model, "seq_id": 1, "adam_params": {}}
            lost = asyncio.create_task(app.post("optim_step", body))
            await begun.wait()
            (pid,) = app.pool.pids
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(httpx.TransportError):
                await lost
            go_on.set()
            await until(lambda: app.pool is not None and app.pool.pids not in ([], [pid]))
            again = await app.post("optim_step", body)
            assert again.json() == {"request_id": f"{model}:1"}
            assert "metrics" in (await app.result(again.json())).json()
            await until(lambda: len(app.service.connections) == 1)  # those of the killed one do not count

    asyncio.run(main())


def test_messages_arrive_whole_however_they_are_cut() -> None:
    """Fails if `Channel.data_received` expects a message in one piece, or forgets the beginning of the next."""
    sent = [ReadBody(number) for number in range(5)] + [BodyPart(7, bytes(100_000), more=True, decoded=None)]
    data = b"".join(part for message in sent for part in encode(message))

    async def main() -> None:
        for size in (1, 3, 8, 50, 70_000, len(data)):
            received: list[object] = []
            channel = Channel(received.append, lambda: None)
            for start in range(0, len(data), size):
                channel.data_received(data[start : start + size])
            assert received == sent

    asyncio.run(main())
