"""Slots on a Ray cluster of three nodes: placement, deaths of processes, node agents, raylets, and who is refused."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.cluster.conftest import RayCluster
from tinsmith.engine.adapters.access import check_folder
from tinsmith.engine.base import SampleRequest
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.processes.client import RemoteEngine, start_engine
from tinsmith.engine.processes.slots import Program, read_file
from tinsmith.engine.processes.tls import Identity
from tinsmith.errors import ConfigError, EngineDied

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

CONFIG = EngineConfig(source="fake", kind="fake")
REQUEST = SampleRequest(request_id="r", prompt=np.array([1, 2, 3], np.int32), max_tokens=5, seed=1)


@pytest.fixture(scope="module")
def wait() -> Iterator[Any]:
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture
def slots(ray_cluster: RayCluster, wait: Any) -> Iterator[Any]:
    from tinsmith.engine.processes.ray_slots import RaySlots

    slots = wait(RaySlots.connect(ray_cluster.address, Identity.new()))
    yield slots
    wait(slots.close())


@pytest.fixture
def start(wait: Any) -> Iterator[Any]:
    """Starts a fake engine in a slot; it is closed after the test."""
    engines: list[RemoteEngine] = []

    async def start(slot: Any, generation: int) -> RemoteEngine:
        engines.append(await start_engine(slot, CONFIG, "fake", generation))
        return engines[-1]

    yield start
    for engine in engines:
        wait(engine.close())


def agent_of(pid: int) -> psutil.Process:
    parent = psutil.Process(pid).parent()
    assert parent is not None
    return parent


def is_left(process: psutil.Process) -> bool:
    """Whether a process still computes; what waits only to be reaped holds nothing."""
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


async def until_gone(*processes: psutil.Process, seconds: float = 5.0) -> None:
    left = list(processes)
    for _ in range(int(seconds / 0.05)):
        left = [process for process in left if is_left(process)]
        if not left:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"{left} are left after {seconds:g} s")


def test_slots_are_placed_and_given_back(slots: Any, start: Any, wait: Any, tmp_path: Path) -> None:
    async def run() -> None:
        scattered = await slots.reserve(2, name="sampler", strategy="scatter")
        assert len({slot.machine for slot in scattered}) == 2
        assert {slot.machine for slot in scattered} <= {machine.name for machine in await slots.machines()}
        assert [slot.name for slot in scattered] == ["sampler-0", "sampler-1"]
        await check_folder(scattered, tmp_path)
        engines = await asyncio.gather(*(start(slot, 1) for slot in scattered))
        results = [await engine.sample(REQUEST) for engine in engines]
        assert results[0].sequences[0].tokens.tolist() == results[1].sequences[0].tokens.tolist()
        started = [psutil.Process(engine.pid) for engine in engines]
        assert {process.cwd() for process in started} == {os.getcwd()}
        await slots.give_back(scattered)
        await until_gone(*started)
        packed = await slots.reserve(2, name="trainer", strategy="strict_pack")
        assert len({slot.machine for slot in packed}) == 1
        await slots.give_back(packed)
        assert len(await slots.reserve(4, name="again")) == 4  # all four cores are free again

    wait(run())


def test_each_slot_has_gpus_of_its_own(ray_cluster: RayCluster, slots: Any, wait: Any) -> None:
    async def run() -> None:
        reserved = [*await slots.reserve(2, name="trainer", gpus=1), *await slots.reserve(1, name="sampler", gpus=2)]
        assert [len(slot.gpus) for slot in reserved] == [1, 1, 2]
        assert sorted(gpu for slot in reserved for gpu in slot.gpus) == ["0", "1", "2", "3"]
        await slots.give_back(reserved)

    node = ray_cluster.add_node(cores=3, gpus=4)
    try:
        wait(run())
    finally:
        ray_cluster.kill(node)


def test_killed_process_is_started_again_in_its_slot(slots: Any, start: Any, wait: Any) -> None:
    async def run() -> None:
        (slot,) = await slots.reserve(1, name="trainer")
        engine = await start(slot, 1)
        os.kill(engine.pid, signal.SIGKILL)
        await asyncio.wait_for(slot.process.died.wait(), 5)
        assert slot.process.code == -signal.SIGKILL
        again = await start(slot, 2)
        os.kill(again.pid, signal.SIGSTOP)
        stopped = psutil.Process(again.pid)
        await asyncio.wait_for(slot.end(), 5)
        assert not stopped.is_running()

    wait(run())


def test_node_agent_ends_with_its_process_and_comes_back(slots: Any, start: Any, wait: Any) -> None:
    async def run() -> None:
        (slot,) = await slots.reserve(1, name="trainer")
        engine = await start(slot, 1)
        process = psutil.Process(engine.pid)
        agent_of(engine.pid).kill()
        await until_gone(process, seconds=2)
        await asyncio.wait_for(engine.died.wait(), 5)
        again = await start(slot, 2)
        assert (await again.sample(REQUEST)).sequences

    wait(run())


def test_program_that_does_not_start_shows_its_log(slots: Any, wait: Any) -> None:
    (slot,) = wait(slots.reserve(1, name="trainer"))
    with pytest.raises(EngineDied, match="No module named"):
        wait(slot.start(Program(module="tinsmith.no_such_module"), 1))


def test_folder_that_a_machine_does_not_see_is_refused(slots: Any, wait: Any, tmp_path: Path) -> None:
    class Elsewhere:
        machine = "far"

        async def run(self, function: Any, *args: Any) -> None:
            assert function is read_file

    with pytest.raises(ConfigError, match="far does not see the folder"):
        wait(check_folder([Elsewhere()], tmp_path))  # type: ignore[list-item]
    assert list(tmp_path.iterdir()) == []


def test_death_of_a_raylet_leaves_no_survivor_and_the_slot_moves(
    ray_cluster: RayCluster, slots: Any, start: Any, wait: Any
) -> None:
    async def run() -> None:
        (slot,) = await slots.reserve(1, name="trainer")
        engine = await start(slot, 1)
        process, agent = psutil.Process(engine.pid), agent_of(engine.pid)
        raylet = agent.parent()
        assert raylet is not None
        node = next(node for node in ray_cluster.nodes if raylet.pid in pids_of(node))
        first = slot.machine
        ray_cluster.kill(node)
        await until_gone(process, agent, seconds=2)
        await asyncio.wait_for(engine.died.wait(), 5)
        ray_cluster.add_node()
        for _ in range(5):
            try:
                again = await start(slot, 2)
                break
            except EngineDied:
                continue
        assert slot.machine != first
        assert (await again.sample(REQUEST)).sequences

    wait(run())


def test_slots_wait_for_a_machine_that_joins(
    ray_cluster: RayCluster, slots: Any, wait: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from tinsmith.engine.processes import ray_slots

    monkeypatch.setattr(ray_slots, "WAIT_LOG_S", 0.5)

    async def run() -> None:
        there = {machine.name for machine in await slots.machines() if machine.cpus}
        wanted = len(there) + 1
        waiting = asyncio.create_task(slots._reserve(wanted, "trainer", {"CPU": 1}, "STRICT_SPREAD"))
        while f"no room for {wanted} x trainer: 1 CPU; waiting for machines" not in caplog.text:
            assert not waiting.done()
            await asyncio.sleep(0.05)
        node = ray_cluster.add_node()
        try:
            reserved = await asyncio.wait_for(waiting, 120)
            assert len({slot.machine for slot in reserved} - there) == 1
        finally:
            ray_cluster.kill(node)  # the cluster is that of all tests

    wait(run())


def test_head_that_is_killed_and_started_again_disturbs_nothing(
    ray_cluster: RayCluster, slots: Any, start: Any, wait: Any
) -> None:
    async def run() -> None:
        (slot,) = await slots.reserve(1, name="trainer")
        engine = await start(slot, 1)
        head = ray_cluster.cluster.head_node
        head.kill_gcs_server(check_alive=False)
        assert (await engine.sample(REQUEST)).sequences
        await asyncio.sleep(2)
        head.start_gcs_server()
        assert (await engine.sample(REQUEST)).sequences
        assert not engine.died.is_set()
        os.kill(engine.pid, signal.SIGKILL)
        await asyncio.wait_for(slot.process.died.wait(), 20)
        assert (await (await start(slot, 2)).sample(REQUEST)).sequences

    wait(run())


def test_node_agent_comes_back_if_the_head_ends_meanwhile(
    ray_cluster: RayCluster, slots: Any, start: Any, wait: Any
) -> None:
    """Fails if a node agent takes all of its bundle (`AGENT_SHARE`): Ray has no room for it beside its lost lease."""

    async def run() -> None:
        (slot,) = await slots.reserve(1, name="trainer")
        engine = await start(slot, 1)
        head = ray_cluster.cluster.head_node
        for generation in range(2, 5):
            agent_of(engine.pid).kill()
            await asyncio.sleep(0.2)  # Ray starts a process for the next node agent, which takes longer
            head.kill_gcs_server(check_alive=False)
            await asyncio.sleep(1)
            head.start_gcs_server()
            async with asyncio.timeout(90):
                await engine.died.wait()
                engine = await start(slot, generation)
        assert (await engine.sample(REQUEST)).sequences

    wait(run())


DRIVER = """
import asyncio, sys
from tinsmith.engine.processes.ray_slots import RaySlots
from tinsmith.engine.processes.client import start_engine
from tinsmith.engine.config import EngineConfig

async def main():
    slots = await RaySlots.connect(sys.argv[1])
    (slot,) = await slots.reserve(1, name="trainer")
    engine = await start_engine(slot, EngineConfig(source="fake", kind="fake"), "fake", 1)
    print(engine.pid, flush=True)
    await asyncio.sleep(300)

asyncio.run(main())
"""


def test_processes_end_with_a_killed_service(ray_cluster: RayCluster) -> None:
    command = [sys.executable, "-c", DRIVER, ray_cluster.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as driver:
        assert driver.stdout is not None
        process = psutil.Process(int(driver.stdout.readline()))
        agent = agent_of(process.pid)
        driver.kill()
    asyncio.run(until_gone(process, agent, seconds=30))


def test_signals_print_no_stack_trace(ray_cluster: RayCluster) -> None:
    command = [sys.executable, "-c", DRIVER, ray_cluster.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline()
        driver.terminate()
        _, errors = driver.communicate(timeout=60)
    assert errors == ""


def test_doctor_checks_the_machines(ray_cluster: RayCluster, tmp_path: Path) -> None:
    options = ["--cluster", ray_cluster.address, "--data", str(tmp_path), "--port", "0", "engine=fake"]
    command = [sys.executable, "-m", "tinsmith", "doctor", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    lines = [line.split(None, 2) for line in done.stdout.splitlines() if line.startswith(("ok", "warn", "fail"))]
    levels = {line[1]: line[0] for line in lines}
    assert {"cluster", "machine", "versions", "folder", "network"} <= levels.keys(), done.stdout
    assert "fail" not in levels.values(), done.stdout


@pytest.mark.parametrize(
    ("environment", "address", "message"),
    [
        ({"RAY_AUTH_TOKEN": "f" * 64}, None, "refuses this process"),
        ({"RAY_AUTH_MODE": "disabled"}, None, "without a token whoever reaches it can run programs"),
        ({}, "ray://127.0.0.1:10001", "one of Ray's client"),
    ],
    ids=["wrong token", "no token", "Ray Client"],
)
def test_clusters_that_are_refused(
    environment: dict[str, str], address: str | None, message: str, ray_cluster: RayCluster
) -> None:
    program = (
        "import asyncio, sys; from tinsmith.engine.processes.ray_slots import RaySlots;"
        "asyncio.run(RaySlots.connect(sys.argv[1]))"
    )
    command = [sys.executable, "-c", program, address or ray_cluster.address]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ConfigError" in done.stderr
    assert message in done.stderr


def pids_of(node: Any) -> list[int]:
    return [info.process.pid for infos in node.all_processes.values() for info in infos]
