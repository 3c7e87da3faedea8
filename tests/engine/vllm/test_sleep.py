"""A vLLM on the trainer's GPU that sleeps while the trainer computes, as a stub."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine.cluster.pools import FakeProcess
from tests.engine.sampling.helpers import sample_request
from tests.engine.vllm.replicas import launch_of, write_adapter
from tests.engine.vllm.stub import SLOW
from tests.engine.vllm.test_engine import CARD, FACTS, until
from tinsmith.engine.base import SampleRequest, SampleResult
from tinsmith.engine.cluster import shared_gpu
from tinsmith.engine.cluster.pool import SamplerPool
from tinsmith.engine.cluster.replica import SamplerProcess
from tinsmith.engine.cluster.shared_gpu import SharedGpu
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.device_sharing import POLICIES
from tinsmith.engine.fake.engine import FakeEngine
from tinsmith.engine.memory_plan import Gpu, MemoryPlan, VllmPlan
from tinsmith.engine.processes import supervisor
from tinsmith.engine.processes.rpc import DelegatingEngine
from tinsmith.engine.vllm.sampler import VllmSampler
from tinsmith.engine.vllm.server import VllmServer, command_of, environment_of, sleeps
from tinsmith.engine_options import VllmConfig
from tinsmith.errors import ConfigError, EngineError
from tinsmith.service.config import ServeConfig

pytestmark = pytest.mark.e2e

SLEEP, WAKE, LOAD = "/sleep?level=1&mode=keep", "/wake_up", "/v1/load_lora_adapter"
GPU_CARD = replace(CARD, device="cuda:0")
SECONDS = 240.0
"""Time limit of a test."""


class Trainer(DelegatingEngine):
    """A training engine that records its calls."""

    def __init__(self, log: Path) -> None:
        super().__init__(FakeEngine(EngineConfig(source="toy", kind="fake")))
        self._log = log
        self.go_on = asyncio.Event()
        """A pass ends once it is set."""
        self.go_on.set()

    def record(self, call: str) -> None:
        with self._log.open("a") as file:
            file.write(json.dumps([call, {}]) + "\n")

    async def run(self, passes: Any) -> Any:
        self.record("run")
        await self.go_on.wait()
        return passes

    async def sample(self, request: SampleRequest, on_delta: Any = None) -> SampleResult:
        self.record("sample")
        return SampleResult(sequences=())

    async def release_memory(self) -> None:
        self.record("release_memory")


class Sleeping:
    """A trainer and a vLLM that share a GPU, with one version, and the calls of both in order."""

    def __init__(self, python: Path, folder: Path) -> None:
        self._record, self._faults = folder / "record", folder / "faults"
        args = ("--record", str(self._record), "--faults", str(self._faults))
        settings = VllmConfig(python=python, rank=8, args=args, sleep=True)
        self.config = EngineConfig(source="here", sampler="vllm", vllm=settings, engine_timeout_s=2.0)
        self.adapter = write_adapter(folder / "adapter")
        self.trainer = Trainer(self._record)
        self.gpu = SharedGpu(self.trainer.release_memory, POLICIES[self.config.sharing])
        self.in_turns = self.gpu.trainer(self.trainer)
        self.started: list[VllmSampler] = []

    async def start(self) -> None:
        launch = self.gpu.launch(launch_of(self.config, GPU_CARD, self.adapter, self.started.append))
        self.pool = await SamplerPool.start([launch], GPU_CARD, trainer=self.in_turns)

    @property
    def server(self) -> VllmServer:
        """The vLLM that was started last."""
        return self.started[-1].server

    def break_paths(self, faults: dict[str, str]) -> None:
        """From now on, let these paths of vLLM hang or fail."""
        new = self._faults.with_suffix(".new")
        new.write_text(json.dumps(faults))
        new.replace(self._faults)

    def calls(self) -> list[str]:
        lines = self._record.read_text().splitlines() if self._record.exists() else []
        return [json.loads(line)[0] for line in lines]

    async def sampled(self, **settings: Any) -> list[int]:
        request = sample_request([10, 20], max_tokens=1, **settings)
        return (await self.pool.sample(request)).sequences[0].tokens.tolist()


@asynccontextmanager
async def sleeping(python: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Sleeping]:
    """Both, started; a workload that has nothing to do gives the GPU away at once."""
    monkeypatch.setattr("tinsmith.engine.device_sharing.IDLE_S", 0.0)
    pair = Sleeping(python, folder)
    async with asyncio.timeout(SECONDS):
        await pair.start()
        try:
            await pair.pool.attach("version", pair.adapter)
            yield pair
        finally:
            await pair.pool.close()
            await pair.gpu.close()


def test_each_has_the_gpu_in_its_turn(python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """To break it: leave out a `turn` in `shared_gpu`."""

    async def main() -> None:
        async with sleeping(python, tmp_path, monkeypatch) as pair:
            await pair.in_turns.run([])
            await pair.in_turns.run([])
            assert await pair.sampled(version="version") == [21]
            assert await pair.sampled(version="version") == [21]
            await pair.pool.sample(sample_request([10, 20], top_k=5))  # the trainer's
            assert await pair.sampled(version="version") == [21]
            assert pair.calls() == [
                *("release_memory", "release_memory", SLEEP, "run", "run"),
                *("release_memory", WAKE, LOAD, "/v1/completions", "/v1/completions"),
                *(SLEEP, "sample", "release_memory", WAKE, "/v1/completions"),
            ]

    asyncio.run(main())


def test_running_samples_pause_while_the_trainer_computes(
    python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Longer than the limit of a stall. To break it: leave out `is_asleep` in `_check_health`, or `pausable`."""

    async def main() -> None:
        async with sleeping(python, tmp_path, monkeypatch) as pair:
            slow = asyncio.create_task(pair.pool.sample(sample_request((SLOW, 1))))
            await until(lambda: "/v1/completions" in pair.calls())
            pair.trainer.go_on.clear()
            passing = asyncio.create_task(pair.in_turns.run([]))
            await until(lambda: "run" in pair.calls())
            pair.break_paths({"/metrics": "frozen"})
            answers = pair.server.answers
            await until(lambda: pair.server.answers > answers + 12)
            assert not slow.done()
            assert WAKE not in pair.calls()
            pair.break_paths({})
            pair.trainer.go_on.set()
            await passing
            await until(lambda: WAKE in pair.calls())  # for the sample that waits
            slow.cancel()
            assert len(pair.started) == 1

    asyncio.run(main())


@pytest.mark.parametrize("path", [SLEEP, WAKE])
@pytest.mark.parametrize("fault", ["hang", "out of memory"])
def test_vllm_that_fails_to_sleep_or_wake_is_restarted(
    python: Path, tmp_path: Path, path: str, fault: str, monkeypatch: pytest.MonkeyPatch
):
    """Its memory is free after that. To break it: leave out `os.killpg` in `VllmServer._switch`."""

    async def main() -> None:
        async with sleeping(python, tmp_path, monkeypatch) as pair:
            pair.break_paths({path: fault})
            await pair.in_turns.run([])
            assert await pair.sampled() == [21]
            assert len(pair.started) == 2
            pair.break_paths({})
            await pair.in_turns.run([])
            assert await pair.sampled() == [21]
            assert len(pair.started) == 2

    asyncio.run(main())


def test_sample_that_waits_for_a_dead_vllm_moves(python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """To break it: leave out `_check_open` in `VllmClient`."""

    async def main() -> None:
        async with sleeping(python, tmp_path, monkeypatch) as pair:
            pair.trainer.go_on.clear()
            passing = asyncio.create_task(pair.in_turns.run([]))
            await until(lambda: "run" in pair.calls())
            waiting = asyncio.create_task(pair.sampled())
            await until(lambda: pair.pool.status()[0].requests == 1)
            os.killpg(pair.server.pid, signal.SIGKILL)
            await until(lambda: not pair.started[0].folder.exists())  # it is closed
            pair.trainer.go_on.set()
            await passing
            assert await waiting == [21]
            assert len(pair.started) == 2

    asyncio.run(main())


def test_vllm_is_restarted_in_its_own_turn(python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The memory of a running pass is not free. To break it: leave out `turn` in
    `SharedGpu.launch`."""

    async def main() -> None:
        async with sleeping(python, tmp_path, monkeypatch) as pair:
            pair.trainer.go_on.clear()
            passing = asyncio.create_task(pair.in_turns.run([]))
            await until(lambda: "run" in pair.calls())
            os.kill(pair.server.pid, signal.SIGKILL)
            await until(lambda: not pair.pool.living)
            assert pair.calls()[-1] == "run"
            pair.trainer.go_on.set()
            await passing
            assert await pair.sampled() == [21]
            assert pair.calls()[-3:] == ["release_memory", "release_memory", "/v1/completions"]

    asyncio.run(main())


def test_starts_that_lack_memory_end(python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Whoever waits is answered; vLLM is started again with the next sample.

    To break it: leave out `_failure` in `SamplerPool._change`.
    """

    async def main() -> None:
        monkeypatch.setattr(supervisor, "FIRST_RETRY_S", 0.0)
        async with sleeping(python, tmp_path, monkeypatch) as pair:
            started = VllmServer._start

            async def no_memory(server: VllmServer, python: Path) -> None:
                pair.trainer.record("start")
                raise EngineError("vLLM ended: no memory left for the cache")

            monkeypatch.setattr(VllmServer, "_start", no_memory)
            pair.break_paths({WAKE: "out of memory"})
            await pair.in_turns.run([])
            for _ in range(2):
                with pytest.raises(EngineError, match=r"for 5 times in a row: .*no memory left"):
                    await pair.sampled()
            await until(lambda: pair.calls().count("start") == 6)
            monkeypatch.setattr(VllmServer, "_start", started)
            pair.break_paths({})
            with pytest.raises(EngineError, match="no memory left"):
                await pair.sampled()
            await pair.pool.up.wait()
            assert await pair.sampled() == [21]

    asyncio.run(main())


def test_older_vllm_is_refused(python: Path, tmp_path: Path):
    async def main() -> None:
        pair = Sleeping(python, tmp_path)
        pair.break_paths({"/openapi.json": "older"})
        with pytest.raises(ConfigError, match=r"no sleep mode that keeps its requests.*vllm.sleep=false"):
            await pair.start()
        await pair.gpu.close()

    asyncio.run(main())


def test_sleep_mode_reaches_command_and_environment(monkeypatch: pytest.MonkeyPatch):
    """PyTorch's expandable segments exclude vLLM's sleep mode; a user's other settings stay."""
    share = VllmPlan(weights=1, adapters=2, working=3, cache=4, cache_tokens=4, context=4, share=0.4, asleep=1)
    plan = MemoryPlan(
        gpu=Gpu(name="a GPU", total_bytes=100, free_bytes=100), facts=FACTS, available=100, reserve=0, weights=0,
        stacks=0, slots=0, decoded=0, activations=0, cache=0, models=0, pass_tokens=1, cache_tokens=1, vllm=share,
    )  # fmt: skip
    card = replace(GPU_CARD, memory=plan)
    awake = replace(card, memory=replace(plan, vllm=replace(share, asleep=None)))
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64, expandable_segments:True")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.delenv("VLLM_SERVER_DEV_MODE", raising=False)
    for each, expected in ((card, True), (awake, False), (replace(card, device="cpu"), False), (GPU_CARD, False)):
        assert sleeps(VllmConfig(), each) == expected
        assert ("--enable-sleep-mode" in command_of(Path("python"), VllmConfig(), each, 1, "m")) == expected
        environment = environment_of(VllmConfig(), each, 0)
        assert ("VLLM_SERVER_DEV_MODE" in environment) == expected
        assert ("expandable" not in environment["PYTORCH_CUDA_ALLOC_CONF"]) == expected
        assert environment["PYTORCH_ALLOC_CONF"] == ("" if expected else "expandable_segments:True")
        assert "max_split_size_mb:64" in environment["PYTORCH_CUDA_ALLOC_CONF"]
    assert sleeps(VllmConfig(sleep=True), GPU_CARD)


@pytest.mark.parametrize(
    "settings", [{"device": "cpu"}, {"vllm": {"sleep": True, "devices": "1"}}, {"cluster": {"samplers": 1}}]
)
def test_sleep_without_a_shared_gpu_is_refused(settings: dict[str, Any]):
    with pytest.raises(ValueError, match=r"vllm\.sleep: true is for a vLLM on the trainer's GPU"):
        ServeConfig(**{"sampler": "vllm", "vllm": {"sleep": True}, **settings})


def test_trainer_that_is_busy_delays_no_start(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shared_gpu, "RELEASE_S", 0.0)

    async def main() -> SamplerProcess:
        async def busy() -> None:
            await asyncio.Event().wait()

        return await SharedGpu(busy, None).launch(launch)()

    async def launch() -> SamplerProcess:
        return started

    started = SamplerProcess(engine=FakeProcess(), ended=asyncio.Event().wait)
    assert asyncio.run(main()) is started
