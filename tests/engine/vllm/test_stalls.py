"""A vLLM that stalls is killed and restarted, and whoever waited for it is answered.

To break it: leave out `os.killpg` in `VllmServer._kill_when_stalled`.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.engine.sampling.helpers import sample_request
from tests.engine.vllm.stub import SLOW
from tests.engine.vllm.test_engine import CARD, until
from tinsmith.engine.cluster.vllm_worker import FolderVersions
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
    """A vLLM of its own, whose requests a test makes hang or fail."""

    def __init__(self, python: Path, folder: Path) -> None:
        self._faults, self._record = folder / "faults", folder / "record"
        args = ("--record", str(self._record), "--faults", str(self._faults))
        settings = VllmConfig(python=python, rank=8, args=args)
        self.config = EngineConfig(source="here", sampler="vllm", vllm=settings, engine_timeout_s=TIMEOUT_S)
        self.sampler = VllmSampler(FolderVersions(), self.config, CARD, restarts=True)
        self.server = self.sampler.server

    def break_paths(self, faults: dict[str, str]) -> None:
        """From now on, let these paths of vLLM hang or fail, also after it was restarted."""
        new = self._faults.with_suffix(".new")
        new.write_text(json.dumps(faults))
        new.replace(self._faults)

    def count(self, path: str) -> int:
        """Requests to a path so far."""
        lines = self._record.read_text().splitlines() if self._record.exists() else []
        return sum(json.loads(line)[0] == path for line in lines)


@asynccontextmanager
async def stalling(python: Path, folder: Path) -> AsyncIterator[Stalling]:
    """A vLLM with one version, whose adapter changes nothing."""
    vllm, adapter = Stalling(python, folder), folder / "adapter"
    adapter.mkdir()
    settings = {"peft_type": "LORA", "r": 1, "lora_alpha": 32, "target_modules": ["q_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    (adapter / "adapter_model.safetensors").write_text("")
    try:
        async with asyncio.timeout(SECONDS):
            await vllm.server.start()
            await vllm.sampler.attach(ZERO_ADAPTER, adapter)
            for version in ("version", "new"):
                await vllm.sampler.attach(version, adapter)
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
def test_vllm_without_health_is_restarted(python: Path, tmp_path: Path, fault: str):
    """What runs fails as after a death, what comes later waits for the restart, and readiness says so."""

    async def main() -> None:
        async with stalling(python, tmp_path) as vllm:
            host = await host_of(vllm)
            pid = vllm.server.pid
            running = asyncio.create_task(vllm.sampler.sample(sample_request((SLOW, 1))))
            await until(lambda: vllm.count("/v1/completions") == 1)
            assert host.sampler_is_up
            vllm.break_paths({"/health": fault})
            with pytest.raises(EngineDied, match="stalled: /health has not answered with status 200 for 2 s") as death:
                await running
            assert death.value.process == 1
            await until(is_gone(pid))
            assert (host.is_up, host.sampler_is_up) == (True, False)
            later = asyncio.create_task(vllm.sampler.sample(sample_request([10, 20], max_tokens=1)))
            await asyncio.sleep(TIMEOUT_S)
            assert not later.done()
            assert not host.sampler_is_up
            vllm.break_paths({})
            assert (await later).sequences[0].tokens.tolist() == [21]
            assert host.sampler_is_up
            assert vllm.server.starts >= 2

    asyncio.run(main())


async def host_of(vllm: Stalling) -> EngineHost:
    """The host whose readiness `/readyz` reports, with this vLLM as the sampler."""

    async def start(config: EngineConfig) -> RunningEngine:
        engine = FakeEngine(EngineConfig(source="here", kind="fake"))
        return RunningEngine(engine=engine, died=asyncio.Event(), sampler_up=vllm.server.up)

    host = EngineHost(vllm.config, ["here"], start)
    await host.start()
    return host


def test_adapter_that_is_never_loaded_ends_vllm(python: Path, tmp_path: Path):
    """To break it: leave out `answered_in_time` in `VllmVersions._post`."""

    async def main() -> None:
        async with stalling(python, tmp_path) as vllm:
            sampler, pid = vllm.sampler, vllm.server.pid
            await sampler.sample(sample_request([10, 20], max_tokens=1))
            vllm.break_paths({LOAD: "hang"})
            with pytest.raises(EngineDied, match=r"load_lora_adapter \(v\d+\) has not answered for 2 s"):
                await sampler.sample(sample_request([10, 20], version="version", max_tokens=1))
            await until(is_gone(pid))
            vllm.break_paths({LOAD: "no such file"})
            with pytest.raises(EngineError, match=r"does not load the adapter.*no such file"):
                await sampler.sample(sample_request([10, 20], version="version", max_tokens=1))
            vllm.break_paths({})
            (sequence,) = (await sampler.sample(sample_request([10, 20], version="version", max_tokens=1))).sequences
            assert sequence.tokens.tolist() == [21]

    asyncio.run(main())


@pytest.mark.parametrize("path", ["/v1/completions", LOAD])
def test_vllm_whose_engine_has_ended_is_restarted(python: Path, tmp_path: Path, path: str):
    """It answers requests and /health with errors before it exits. To break it: let `request_failed` kill nothing."""

    async def main() -> None:
        async with stalling(python, tmp_path) as vllm:
            vllm.break_paths({path: "EngineCore encountered an issue", "/health": "EngineCore encountered an issue"})
            with pytest.raises(EngineDied, match="its engine has ended"):
                await vllm.sampler.sample(sample_request([10, 20], version="version", max_tokens=1))
            vllm.break_paths({})
            await vllm.sampler.sample(sample_request([10, 20], version="version", max_tokens=1))
            assert vllm.server.starts == 2
            vllm.break_paths({path: "out of order"})
            with pytest.raises(EngineError, match="out of order"):
                await vllm.sampler.sample(sample_request([10, 20], version="new", max_tokens=1))
            assert vllm.server.starts == 2

    asyncio.run(main())


def test_vllm_whose_requests_make_no_progress_is_restarted(python: Path, tmp_path: Path):
    """/health answers 200 all the time, and vLLM counts no running request, as where its engine hangs before its first
    step. To break it: leave out `sampling` in `VllmSampler._complete`.
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

    async def main() -> list[int]:
        lives = []
        async with stalling(python, tmp_path) as vllm:
            for number in (1, 2):
                running = asyncio.create_task(vllm.sampler.sample(sample_request((SLOW, 1))))
                await until(lambda number=number: vllm.count("/v1/completions") == number)
                os.kill(vllm.server.pid, 9)
                with pytest.raises(EngineDied) as death:
                    await running
                lives.append(death.value.process)
        return lives

    assert asyncio.run(main()) == [1, 2]
