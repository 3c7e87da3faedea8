"""A service in a process of its own that tests may kill.

`child` starts `python -m tests.service.support.process`, which reads its settings from standard input. The fake engine
waits `delay` seconds before each call, and starts and works only while it is not held: `Child.hold` keeps requests in
flight until the test releases them, however slow the machine is.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.service.support.databases import free_port as free_port
from tests.service.support.databases import url_of
from tinsmith.engine.base import AdamParams, OnDelta, SampleRequest
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.fake.engine import FakeEngine
from tinsmith.engine.processes.client import start_local
from tinsmith.engine.training.model_locks import ModelLocks
from tinsmith.service.config import ServeConfig
from tinsmith.service.engines.host import EngineFactory, RunningEngine
from tinsmith.service.http import serving
from tinsmith.service.results.futures import Futures
from tinsmith.service.server import serve

ROOT = Path(__file__).parents[3]
LIMIT_S = 120.0
"""Time for what takes a moment on a machine that does not stand still."""


def eventually(holds: Callable[[], object]) -> None:
    """Wait until `holds()` is true, for LIMIT_S at most."""
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline, "The condition did not become true."
        time.sleep(0.02)


class Signs:
    """Files between a test and its service: whether the engine is held, at a call, and how many polls wait."""

    def __init__(self, data: Path) -> None:
        names = (f"{data.name}-{name}" for name in ("held", "reached", "polls"))  # beside the data, which tests look at
        self.held, self.reached, self.polls = (data.parent / name for name in names)

    async def pass_through(self) -> None:
        """Wait in the service while the engine is held."""
        while self.held.exists():
            self.reached.touch()
            await asyncio.sleep(0.01)

    def report_polls(self) -> None:
        """Write the number of polls that wait in the service, from now on."""
        waiting, wait_in = 0, Futures._wait_in

        async def counted(futures: Futures, waiters: set[asyncio.Future[None]]) -> None:
            nonlocal waiting
            waiting += 1
            self.polls.write_text(f"{waiting}\n")
            try:
                await wait_in(futures, waiters)
            finally:
                waiting -= 1
                self.polls.write_text(f"{waiting}\n")

        Futures._wait_in = counted  # type: ignore[method-assign]


class SlowEngine(FakeEngine):
    """Waits before passes, steps and samples."""

    def __init__(self, config: EngineConfig, delay: float, signs: Signs) -> None:
        super().__init__(config)
        self._delay, self._signs, self._in_order = delay, signs, ModelLocks()

    async def run(self, passes):
        async with self._in_order.of_all(request.model_id for request in passes):
            await self._wait()
            return await super().run(passes)

    async def step(self, model_id: str, adam: AdamParams):
        async with self._in_order.of(model_id):
            await self._wait()
            return await super().step(model_id, adam)

    async def sample(self, request: SampleRequest, on_delta: OnDelta | None = None):
        await self._wait()
        return await super().sample(request, on_delta)

    async def _wait(self) -> None:
        await asyncio.sleep(self._delay)
        await self._signs.pass_through()


def slow(delay: float, signs: Signs) -> EngineFactory:
    """Starts fake engines that wait `delay` seconds before each call, and as long as they are held."""

    async def start(config: EngineConfig) -> RunningEngine:
        await signs.pass_through()
        return RunningEngine(engine=SlowEngine(config, delay, signs), died=asyncio.Event())

    return start


async def separate(config: EngineConfig) -> RunningEngine:
    """Starts fake engines in processes of their own, as real ones are."""
    remote = await start_local(config)
    return RunningEngine(engine=remote, died=remote.died, process=remote)


@dataclass
class Child:
    """A running service process and its address."""

    popen: subprocess.Popen
    url: str
    signs: Signs

    def hold(self) -> None:
        """From now on passes, steps and samples wait."""
        self.signs.held.touch()

    def until_held(self) -> None:
        """Wait until a call of the engine waits."""
        eventually(self.signs.reached.exists)

    def release(self) -> None:
        """Go on with what waits."""
        self.signs.held.unlink()

    def until_polls_wait(self, count: int) -> None:
        """Wait until so many polls wait for results."""
        eventually(lambda: self.signs.polls.exists() and self.signs.polls.read_text() == f"{count}\n")

    def until_draining(self) -> None:
        """Wait until the service no longer accepts work."""
        eventually(lambda: httpx.get(f"{self.url}/readyz", timeout=LIMIT_S).json()["status"] == "draining")

    @property
    def engine_pid(self) -> int:
        """Of a child with a separate engine."""
        [pid] = Path(f"/proc/{self.popen.pid}/task/{self.popen.pid}/children").read_text().split()
        return int(pid)

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()


@contextmanager
def child(
    config: ServeConfig,
    delay: float = 0.0,
    held: bool = False,
    separate: bool = False,
    drain_s: float = serving.DRAIN_S,
) -> Iterator[Child]:
    """Run a service in a child process, until it is ready. With `held`, its engine is held and its start not awaited;
    with `separate`, the engine has a process of its own. `drain_s`: time for running work after a signal."""
    config.data.mkdir(parents=True, exist_ok=True)
    signs = Signs(config.data)
    for sign in (signs.held, signs.reached, signs.polls):  # of an earlier service of the folder
        sign.unlink(missing_ok=True)
    if held:
        signs.held.touch()
    config = config.model_copy(update={"database": config.database or url_of(config.data)})
    with (config.data / "log").open("ab") as log:
        popen = subprocess.Popen(
            [sys.executable, "-m", __name__], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
        )
    assert popen.stdin is not None
    assert popen.stdout is not None
    try:
        options = {"delay": delay, "separate": separate, "drain_s": drain_s}
        popen.stdin.write(json.dumps({"config": config.model_dump(mode="json"), **options}).encode())
        popen.stdin.close()
        url = f"http://127.0.0.1:{config.port}"
        if not held and not (url := popen.stdout.readline().decode().strip()):
            raise AssertionError((config.data / "log").read_text())
        yield Child(popen, url, signs)
    finally:
        popen.kill()
        popen.wait()
        popen.stdout.close()


def main() -> None:
    options = json.load(sys.stdin)

    def announce(url: str, _key: str) -> None:
        print(url, flush=True)

    config = ServeConfig(**options["config"])
    signs = Signs(config.data)
    signs.report_polls()
    serving.DRAIN_S = options["drain_s"]  # type: ignore[misc]
    serve(config, start=separate if options["separate"] else slow(options["delay"], signs), on_ready=announce)


if __name__ == "__main__":
    main()
