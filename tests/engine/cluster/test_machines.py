"""What machines of a cluster must be like, and the plan that is printed before anything is loaded."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tinsmith.engine.adapters.access import check_folder
from tinsmith.engine.cluster.plan import plan, uses_gpus, with_threads
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.processes.machine import Machine, versions
from tinsmith.engine.processes.node_agent import SlotLocation
from tinsmith.engine.processes.ray_checks import check_address, check_locations
from tinsmith.engine.processes.slots import LocalSlot
from tinsmith.errors import ConfigError

MACHINE = Machine(
    name="a",
    host="10.0.0.1",
    cpus=8,
    memory_bytes=64 << 30,
    gpus=("H200",) * 2,
    versions={**versions(), "ray": "2.60.0"},
)
LOCATION = SlotLocation(machine=MACHINE, gpus=("0",), requires_token=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"versions": {**MACHINE.versions, "torch": "2.9.0"}}, "b has torch 2.9.0"),
        ({"versions": {**MACHINE.versions, "tinsmith": "0.0.1"}}, "b has tinsmith 0.0.1"),
        ({"versions": {**MACHINE.versions, "python": "3.9"}}, "b has python 3.9"),
        ({"versions": {name: MACHINE.versions[name] for name in ("python", "torch")}}, "b has tinsmith missing"),
        ({"gpus": ("A100",)}, "GPUs of different kinds .A100, H200."),
    ],
    ids=["torch", "tinsmith", "python", "not installed", "GPUs"],
)
def test_machines_that_differ_are_refused(change: dict[str, Any], message: str) -> None:
    check_locations([LOCATION, replace(LOCATION, machine=replace(MACHINE, name="b"))])
    with pytest.raises(ConfigError, match=message):
        check_locations([LOCATION, replace(LOCATION, machine=replace(MACHINE, name="b", **change))])


def test_machine_and_server_without_a_token_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="Ray on a accepts callers without a token"):
        check_locations([replace(LOCATION, requires_token=False)])
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with pytest.raises(ConfigError, match="whoever reaches it can run programs"):
        asyncio.run(check_address("auto"))
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    asyncio.run(check_address("auto"))
    with pytest.raises(ConfigError, match="Ray's client"):
        asyncio.run(check_address("ray://10.0.0.1:10001"))


def slots(machine: Machine, count: int, gpus: tuple[str, ...] = (), name: str = "trainer") -> list[LocalSlot]:
    made = [LocalSlot(f"{name}-{number}", gpus) for number in range(count)]
    for slot in made:
        slot.machine, slot.host = machine.name, machine.host
    return made


def test_cores_of_the_fullest_machine_are_divided() -> None:
    small = replace(MACHINE, name="b", cpus=4)
    config = EngineConfig(source="m", device="cpu")
    placed = [*slots(MACHINE, 2), *slots(small, 3)]
    assert with_threads(config, placed[:2], placed[2:], [MACHINE, small]).threads == 1
    assert with_threads(config, placed[:2], (), [MACHINE, small]).threads == 4
    assert with_threads(config.model_copy(update={"threads": 3}), placed, (), [MACHINE, small]).threads == 3


def test_gpus_are_used_where_there_are_some() -> None:
    config = EngineConfig(source="m")
    none = replace(MACHINE, gpus=())
    assert (uses_gpus(config, [none, MACHINE]), uses_gpus(config, [none])) == (True, False)
    assert not uses_gpus(config.model_copy(update={"device": "cpu"}), [MACHINE])
    assert uses_gpus(config.model_copy(update={"device": "cuda"}), [none])


@pytest.fixture
def model(tmp_path: Path) -> Callable[[int], EngineConfig]:
    """Settings with a base model of so many bytes of weight files, which take no room."""

    def make(size: int) -> EngineConfig:
        with (tmp_path / "model.safetensors").open("wb") as file:
            os.truncate(file.fileno(), size)
        return EngineConfig(source=str(tmp_path), threads=2)

    return make


def test_plan_names_every_process_and_what_does_not_fit(model: Callable[[int], EngineConfig]) -> None:
    """Fails if the plan leaves out a process, or a machine on which the weights alone do not fit."""
    on_cpus = [*plan(model(3 << 30), slots(MACHINE, 2), slots(MACHINE, 1, name="sampler"), [MACHINE])]
    assert on_cpus[0].endswith("2 training and 1 sampling process, 3.2 GB of weight files each")
    assert on_cpus[1].strip() == "a (10.0.0.1, 8 cores, 69 GB)"
    assert [line.strip() for line in on_cpus[2:]] == [
        "trainer-0: CPU, 2 threads", "trainer-1: CPU, 2 threads", "sampler-0: CPU, 2 threads"
    ]  # fmt: skip
    too_large = [*plan(model(40 << 30), slots(MACHINE, 2), (), [MACHINE])]
    assert "2 processes: the weights alone take more" in too_large[2]
    on_gpus = [*plan(model(40 << 30), slots(MACHINE, 1, ("0",)), slots(MACHINE, 1, ("1", "2"), "sampler"), [MACHINE])]
    assert [line.strip() for line in on_gpus[2:]] == ["trainer-0: GPU 0", "sampler-0: GPU 1, 2"]


def test_plan_says_what_does_not_fit_on_a_gpu(model: Callable[[int], EngineConfig]) -> None:
    """Fails if the plan counts the whole model for a share of it, or is silent about one that is too large."""
    machine, other = (replace(MACHINE, name=name, gpu_bytes=24 << 30) for name in "ab")
    config = model(40 << 30)
    trainers, samplers = slots(machine, 2, ("0",)), slots(machine, 1, ("1", "2"), "sampler")
    whole = [*plan(config, trainers, samplers, [machine])]
    assert [("does not fit: 42.9 GB" in line) for line in whole[2:]] == [True, True, False]
    assert not [line for line in plan(config, trainers, samplers, [machine], is_sharded=True) if "not fit" in line]
    apart = [*trainers[:1], *slots(other, 1, ("0",))]
    assert "sharded over 2 machines" in [*plan(config, apart, samplers, [machine, other], is_sharded=True)][-1]


def test_folder_that_a_machine_does_not_see_is_refused(tmp_path: Path, wait: Any) -> None:
    seeing, blind = slots(MACHINE, 2)
    wait(check_folder([seeing], tmp_path))

    async def sees_nothing(function: Any, path: Path, limit: int) -> None:
        return None

    blind.run = sees_nothing  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="a does not see the folder"):
        wait(check_folder([seeing, blind], tmp_path))
    assert list(tmp_path.iterdir()) == []
