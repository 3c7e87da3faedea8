"""A service in a process of its own that tests may kill.

`child` starts `python -m tests.service.support.process`, which reads its settings from standard input. The fake engine
waits `delay` seconds before each call, so that requests are in flight when the process is killed.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.service.support.databases import free_port as free_port
from tests.service.support.databases import url_of
from tests.service.support.frontends import frontends
from tinsmith.engine.base import AdamParams, OnDelta, SampleRequest
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.fake.engine import FakeEngine
from tinsmith.engine.remote import RemoteEngine
from tinsmith.service.config import ServeConfig
from tinsmith.service.engines.host import EngineFactory, RunningEngine
from tinsmith.service.server import serve

ROOT = Path(__file__).parents[3]


class SlowEngine(FakeEngine):
    """Waits before passes, steps and samples."""

    delay = 0.0

    async def run(self, passes):
        await asyncio.sleep(self.delay)
        return await super().run(passes)

    async def step(self, model_id: str, adam: AdamParams):
        await asyncio.sleep(self.delay)
        return await super().step(model_id, adam)

    async def sample(self, request: SampleRequest, on_delta: OnDelta | None = None):
        await asyncio.sleep(self.delay)
        return await super().sample(request, on_delta)


def slow(delay: float, boot: float = 0.0) -> EngineFactory:
    """Starts fake engines after `boot` seconds; they wait `delay` seconds before each call."""

    async def start(config: EngineConfig) -> RunningEngine:
        await asyncio.sleep(boot)
        engine = SlowEngine(config)
        engine.delay = delay
        return RunningEngine(engine=engine, died=asyncio.Event())

    return start


async def separate(config: EngineConfig) -> RunningEngine:
    """Starts fake engines in processes of their own, as real ones are."""
    remote = await RemoteEngine.start(config)
    return RunningEngine(engine=remote, died=remote.died, process=remote)


@dataclass
class Child:
    """A running service process and its address."""

    popen: subprocess.Popen
    url: str

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
    config: ServeConfig, delay: float = 0.0, boot: float = 0.0, wait: bool = True, separate: bool = False
) -> Iterator[Child]:
    """Run a service in a child process; with `wait`, until it is ready; with `separate`, its engine in another."""
    config.data.mkdir(parents=True, exist_ok=True)
    changes = {"database": config.database or url_of(config.data), "frontends": config.frontends or frontends()}
    config = config.model_copy(update=changes)
    with (config.data / "log").open("ab") as log:
        popen = subprocess.Popen(
            [sys.executable, "-m", __name__], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
        )
    assert popen.stdin is not None
    assert popen.stdout is not None
    try:
        options = {"delay": delay, "boot": boot, "separate": separate}
        popen.stdin.write(json.dumps({"config": config.model_dump(mode="json"), **options}).encode())
        popen.stdin.close()
        url = f"http://127.0.0.1:{config.port}"
        if wait and not (url := popen.stdout.readline().decode().strip()):
            raise AssertionError((config.data / "log").read_text())
        yield Child(popen, url)
    finally:
        popen.kill()
        popen.wait()
        popen.stdout.close()


def main() -> None:
    options = json.load(sys.stdin)

    def announce(url: str, _key: str) -> None:
        print(url, flush=True)

    start = separate if options["separate"] else slow(options["delay"], options["boot"])
    serve(ServeConfig(**options["config"]), start=start, on_ready=announce)


if __name__ == "__main__":
    main()
