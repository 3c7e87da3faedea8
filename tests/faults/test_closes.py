"""Ends of sessions: the SDK's `close()` returns, also when processes of the service are killed meanwhile.

`python -m tests.faults.test_closes --seconds 600` ends sessions of many clients while processes are killed, and prints
how many ended, and the stacks of the clients if one did not.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tinker
from tinker.lib.telemetry import Telemetry

from tests import forkserver, sdk_faults
from tests.faults.clients import LOST_CANCELLATION, STUCK_S, has_ended
from tests.faults.closes import CHECK_S, awaits, stacks, wait_until_closed
from tests.faults.plan import Plan
from tests.faults.proxy import Proxy
from tests.faults.run import fake_config, make_keys, quieten
from tests.faults.service import ServiceProcess

KILLS = {"kill_api": 6, "kill_both": 2, "kill_engine": 1, "stop_api": 1}
"""Faults while sessions end: mostly of the process that answers."""
TELEMETRY_S = 1.0
"""Longest time for which the proxy holds a request with telemetry."""
BUSY_S = 0.05
"""Longest time for which another thread of the clients computes at once."""


class SlowProxy(Proxy):
    """A proxy that holds telemetry up for a while, so that it is often under way when a session ends."""

    async def _answer(self, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        if b"/telemetry " in head.partition(b"\r\n")[0]:
            await asyncio.sleep(random.random() * TELEMETRY_S)
        await super()._answer(head, body, writer)


class Client:
    """A client of the SDK that only sends telemetry, by a request that keeps the loop busy before it returns."""

    _session_heartbeat_task = _client_dynamic_config_refresh_task = _cancel_drain_task = None
    _futures_poller_tasks = ()

    def __init__(self, busy_s: float) -> None:
        self._busy_s = busy_s
        self.sender: Telemetry
        self.telemetry = self
        self.is_sending, self.may_end = asyncio.Event(), asyncio.Event()

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    def get_telemetry(self) -> Telemetry:
        return self.sender

    @contextmanager
    def aclient(self, _: object) -> Iterator[Client]:
        yield self

    async def send(self, **_: Any) -> None:
        self.is_sending.set()
        await self.may_end.wait()
        time.sleep(self._busy_s)  # noqa: ASYNC251 - as other threads and processes keep a loop


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="asyncio.wait_for loses no cancellation any more")
def test_close_that_lost_its_cancellation_ends_by_a_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if `wait_until_closed` does not repeat the cancellation, and shows what holds up `close()` in the SDK."""
    monkeypatch.setattr(asyncio, "wait_for", sdk_faults.ORIGINAL)

    async def close() -> None:
        client = Client(0.25)
        telemetry = client.sender = Telemetry(client, "session")  # type: ignore[arg-type]
        await asyncio.sleep(0)
        telemetry._trigger_flush()
        await client.is_sending.wait()
        closing = asyncio.create_task(telemetry.close())
        await asyncio.sleep(0.05)
        client.may_end.set()
        closed: Future[None] = Future()
        closing.add_done_callback(lambda _: closed.set_result(None))
        assert await asyncio.to_thread(wait_until_closed, closed, client, lambda: True, 100.0, 0.5) == 1

    asyncio.run(close())


@pytest.mark.parametrize("turns", range(5))
def test_wait_for_of_tests_loses_no_cancellation(turns: int) -> None:
    """The task is cancelled some turns of the loop after what it waits for has come. That of Python 3.11
    loses it after 0 to 2 turns."""

    async def main() -> None:
        event = asyncio.Event()

        async def wait_and_go_on() -> None:
            await asyncio.wait_for(event.wait(), 60)
            await asyncio.sleep(60)

        waiting = asyncio.create_task(wait_and_go_on())
        await asyncio.sleep(0.01)
        event.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting], timeout=60)
        assert waiting.cancelled()

    asyncio.run(main())


def test_stacks_name_what_waits() -> None:
    async def outer() -> None:
        await inner()

    async def inner() -> None:
        await asyncio.sleep(60)

    async def look() -> list[str]:
        task = asyncio.create_task(outer())
        await asyncio.sleep(0)
        lines = list(awaits(task))
        task.cancel()
        return lines

    names = [line.rpartition(".")[2] for line in asyncio.run(look())]
    assert names[:2] == ["outer", "inner"]
    assert any("test_stacks_name_what_waits" in line for line in stacks())


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_sessions_end_while_processes_are_killed(tmp_path: Path) -> None:
    ended = end_sessions(tmp_path, seconds=60, clients=6, seed=18)
    print(ended)
    assert ended["not ended"] == 0
    assert ended["ended"] > 20


def end_sessions(folder: Path, seconds: float, clients: int, seed: int, busy: int = 2) -> Counter[str]:
    """Open and end sessions in threads while processes of a service are killed, and `busy` other threads compute."""
    quieten()
    config = fake_config(folder / "data")
    service, proxy = ServiceProcess(config), SlowProxy(seed)
    proxy.forward_to(service.config.port)
    keys = asyncio.run(make_keys(config.data, [f"client-{number}" for number in range(clients)]))
    stop, counts = threading.Event(), Counter[str]()
    threads = [threading.Thread(target=_end_sessions, args=(proxy.url, key, stop, counts), daemon=True) for key in keys]
    threads += [threading.Thread(target=_compute, args=(stop,), daemon=True) for _ in range(busy)]
    service.start()
    try:
        service.wait_until_ready()
        for thread in threads:
            thread.start()
        _kill(service, seed, seconds, counts)
        stop.set()
        for thread in threads:
            thread.join(STUCK_S)
    finally:
        service.close()
        proxy.close()
    return counts


def _kill(service: ServiceProcess, seed: int, seconds: float, counts: Counter[str]) -> None:
    end = time.monotonic() + seconds
    for fault in Plan.draw(seed, 100_000, KILLS).faults:
        service.wait_until_ready()
        if time.monotonic() > end:
            return
        time.sleep(fault.after_s)
        if fault.kind == "stop_api":
            resume = service.stop(engine=False)
            time.sleep(fault.lasts_s)
            resume()
        else:
            service.kill(api=fault.kind != "kill_engine", engine=fault.kind != "kill_api")
            if fault.kind != "kill_engine":
                service.start()
        counts[fault.kind] += 1


def _end_sessions(url: str, key: str, stop: threading.Event, counts: Counter[str]) -> None:
    chance = random.Random(key)
    while not stop.is_set():
        with suppress(tinker.TinkerError):  # the service was away for too long
            service = tinker.ServiceClient(base_url=url, api_key=key)
            holder, telemetry = service.holder, service.get_telemetry()
            assert telemetry is not None
            for _ in range(chance.randint(0, 3)):
                telemetry.log("work")
                time.sleep(chance.random() / 2)
            if chance.random() < 0.5:
                telemetry._trigger_flush()  # as an error of an operation does
            closed = service.close("success").future()
            try:
                is_ended = partial(has_ended, url, key, holder.get_session_id())
                lost = wait_until_closed(closed, holder, is_ended, STUCK_S, CHECK_S)
            except FutureTimeoutError:
                counts["not ended"] += 1
                print("\n".join(stacks()), flush=True)
                return
            counts["ended"] += 1
            counts[LOST_CANCELLATION] += lost


def _compute(stop: threading.Event) -> None:
    while not stop.is_set():
        end = time.monotonic() + random.random() * BUSY_S
        while time.monotonic() < end:
            sum(range(1000))
        time.sleep(random.random() * 0.01)


def main() -> None:
    """End sessions for a while, and print how many have ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--seed", type=int, default=18)
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sys.executable = stack.enter_context(forkserver.python(folder))
        counts = end_sessions(folder, options.seconds, options.clients, options.seed)
    print(dict(counts))
    raise SystemExit(bool(counts["not ended"]))


if __name__ == "__main__":
    main()
