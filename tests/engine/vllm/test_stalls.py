"""A vLLM that stalls is killed, its requests fail, and a pool starts another.

To break it: leave out `os.killpg` in `VllmServer._kill_when_stalled`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.engine.sampling.helpers import sample_request
from tests.engine.vllm.replicas import launch_of, write_adapter
from tests.engine.vllm.stub import SLOW
from tests.engine.vllm.test_engine import CARD, until
from tinsmith.engine.cluster.pool import SamplerPool
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.fake.engine import FakeEngine
from tinsmith.engine.vllm.sampler import ZERO_ADAPTER, VllmSampler
from tinsmith.engine_options import VllmConfig
from tinsmith.errors import EngineDied, EngineError
from tinsmith.service.engines.host import EngineHost, RunningEngine

pytestmark = pytest.mark.e2e

TIMEOUT_S = 2.0
LOAD = "/v1/load_lora_adapter"
SECONDS = 240.0
"""Time limit of a test."""


class Stalling:
    """A vLLM, whose requests a test makes hang or fail, with versions whose adapter changes nothing."""

    def __init__(self, python: Path, folder: Path) -> None:
        self._faults, self._record = folder / "faults", folder / "record"
        args = ("--record", str(self._record), "--faults", str(self._faults))
        settings = VllmConfig(python=python, rank=8, args=args)
        self.config = EngineConfig(source="here", sampler="vllm", vllm=settings, engine_timeout_s=TIMEOUT_S)
        self.adapter = write_adapter(folder / "adapter")
        self.sampler = VllmSampler(self.config, CARD)
        self.server = self.sampler.server

    def break_paths(self, faults: dict[str, str]) -> None:
        """From now on, let these paths of vLLM hang or fail, also in later processes."""
        new = self._faults.with_suffix(".new")
        new.write_text(json.dumps(faults))
        new.replace(self._faults)

    def count(self, path: str) -> int:
        """Requests to a path so far."""
        lines = self._record.read_text().splitlines() if self._record.exists() else []
        return sum(json.loads(line)[0] == path for line in lines)


@asynccontextmanager
async def stalling(python: Path, folder: Path) -> AsyncIterator[Stalling]:
    """A vLLM that runs, with one version."""
    vllm = Stalling(python, folder)
    try:
        async with asyncio.timeout(SECONDS):
            await vllm.server.start()
            for version in (ZERO_ADAPTER, "version"):
                await vllm.sampler.attach(version, vllm.adapter)
            yield vllm
    finally:
        await vllm.sampler.close()


def is_gone(pid: int) -> Callable[[], bool]:
    """Whether a process has ended."""

    def gone() -> bool:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        return False

    return gone


@pytest.mark.parametrize("fault", ["hang", "out of order"])
def test_vllm_without_health_is_started_again(python: Path, tmp_path: Path, fault: str):
    """What runs is sampled again by the next vLLM, and readiness says that there is none meanwhile."""

    async def main() -> None:
        vllm = Stalling(python, tmp_path)
        running: list[VllmSampler] = []
        pool = await SamplerPool.start([launch_of(vllm.config, CARD, vllm.adapter, running.append)])
        host = await host_of(pool)
        try:
            pid = running[0].server.pid
            request = asyncio.create_task(pool.sample(sample_request((SLOW, 1))))
            await until(lambda: vllm.count("/v1/completions") == 1)
            assert host.sampler_is_up
            vllm.break_paths({"/health": fault})
            await until(is_gone(pid))
            await until(lambda: not host.sampler_is_up)
            assert host.is_up
            vllm.break_paths({})
            await until(lambda: vllm.count("/v1/completions") == 2)
            assert host.sampler_is_up
            assert not request.done()
            end = running[0].server.end
            assert end is not None
            assert end.text == "stalled: /health has not answered with status 200 for 2 s"
            request.cancel()
        finally:
            await pool.close()

    asyncio.run(asyncio.wait_for(main(), SECONDS))


async def host_of(pool: SamplerPool) -> EngineHost:
    """The host whose readiness `/readyz` reports, with this pool."""

    async def start(config: EngineConfig) -> RunningEngine:
        return RunningEngine(engine=FakeEngine(config), died=asyncio.Event(), sampler_up=pool.up, pool=pool)

    host = EngineHost(EngineConfig(source="here", kind="fake"), ["here"], start)
    await host.start()
    return host


def test_adapter_that_is_never_loaded_ends_vllm(python: Path, tmp_path: Path):
    """To break it: leave out `answered_in_time` in `VllmClient._post`."""

    async def main() -> None:
        async with stalling(python, tmp_path) as vllm:
            vllm.break_paths({LOAD: "no such file"})
            with pytest.raises(EngineError, match=r"does not load the adapter.*no such file"):
                await vllm.sampler.attach("new", vllm.adapter)
            assert not vllm.server.ended.is_set()
            vllm.break_paths({LOAD: "hang"})
            with pytest.raises(EngineDied, match=r"load_lora_adapter \(base-\w+-\d+\) has not answered for 2 s"):
                await vllm.sampler.attach("new", vllm.adapter)
            assert vllm.server.ended.is_set()

    asyncio.run(main())


@pytest.mark.parametrize("path", ["/v1/completions", LOAD])
def test_vllm_whose_engine_has_ended_is_killed(python: Path, tmp_path: Path, path: str):
    """It answers requests and /health with errors before it exits. To break it: let `request_failed` kill nothing."""

    async def main() -> None:
        async with stalling(python, tmp_path) as vllm:

            async def fail() -> None:
                await vllm.sampler.attach("new", vllm.adapter)
                await vllm.sampler.sample(sample_request([10, 20], version="new", max_tokens=1))

            vllm.break_paths({path: "out of order"})
            with pytest.raises(EngineError, match="out of order"):
                await fail()
            assert not vllm.server.ended.is_set()
            vllm.break_paths({path: "EngineCore encountered an issue", "/health": "EngineCore encountered an issue"})
            with pytest.raises(EngineDied, match="its engine has ended"):
                await fail()
            assert vllm.server.ended.is_set()

    asyncio.run(main())


def test_vllm_whose_requests_make_no_progress_is_killed(python: Path, tmp_path: Path):
    """/health answers 200 all the time, and vLLM counts no running request, as where its engine hangs before its first
    step. To break it: leave out `sampling` in `VllmClient.complete`.
    """

    async def main() -> None:
        async with stalling(python, tmp_path) as vllm:
            running = asyncio.create_task(vllm.sampler.sample(sample_request((SLOW, 1))))
            await asyncio.sleep(2 * TIMEOUT_S)
            assert not running.done()  # it is slow, but its metrics change
            vllm.break_paths({"/metrics": "frozen"})
            with pytest.raises(EngineDied, match="stalled: requests run, and vLLM's engine makes no step, for 2 s"):
                await running

    asyncio.run(main())


def test_busy_vllm_makes_progress_on_a_cpu(python: Path, tmp_path: Path):
    """A step may take longer than the limit. To break it: leave out `is_busy` in `VllmServer._check_health`."""

    async def main() -> None:
        async with stalling(python, tmp_path) as vllm:
            vllm.break_paths({"/metrics": "busy"})
            running = asyncio.create_task(vllm.sampler.sample(sample_request((SLOW, 1))))
            await asyncio.sleep(3 * TIMEOUT_S)
            assert not running.done()
            running.cancel()

    asyncio.run(main())


def test_each_death_of_vllm_has_its_own_number(python: Path, tmp_path: Path):
    """So that a request that ends every vLLM is found (`CrashIsolation`). To break it: leave out `death.process`."""

    async def main() -> None:
        vllm = Stalling(python, tmp_path)
        running: list[VllmSampler] = []
        pool = await SamplerPool.start([launch_of(vllm.config, CARD, vllm.adapter, running.append)])
        request = asyncio.create_task(pool.sample(sample_request((SLOW, 1))))
        for number in (1, 2):
            await until(lambda number=number: vllm.count("/v1/completions") == number)
            os.kill(running[-1].server.pid, signal.SIGKILL)
        with pytest.raises(EngineDied) as death:
            await request
        assert death.value.process == 2
        await pool.close()

    asyncio.run(asyncio.wait_for(main(), SECONDS))
