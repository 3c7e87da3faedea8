"""Slots of this machine: processes that start, answer, and end with their parent."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tinsmith.engine.base import SampleRequest
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.fake.engine import FakeEngine
from tinsmith.engine.processes.client import start_engine
from tinsmith.engine.processes.machine import visible_gpus
from tinsmith.engine.processes.slots import LocalSlot, LocalSlots, Program, start_listening
from tinsmith.engine.processes.tls import Identity
from tinsmith.errors import ConfigError, EngineDied

pytestmark = pytest.mark.e2e

CONFIG = EngineConfig(source="fake", kind="fake")
REQUEST = SampleRequest(request_id="r", prompt=np.array([1, 2, 3], np.int32), max_tokens=5, seed=1)

PARENT = """
import asyncio, sys
from tinsmith.engine.processes.machine import visible_gpus
from tinsmith.engine.processes.slots import LocalSlots
from tinsmith.engine.processes.client import start_engine
from tinsmith.engine.config import EngineConfig

async def main():
    (slot,) = await LocalSlots().reserve(1, name="worker")
    engine = await start_engine(slot, EngineConfig(source="fake", kind="fake"), "fake", 1)
    print(engine.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.fixture
def slots(wait: Any) -> Iterator[LocalSlots]:
    slots = LocalSlots()
    yield slots
    wait(slots.close())


def test_engine_in_a_slot_equals_a_local_one_and_starts_again(slots: LocalSlots, wait: Any) -> None:
    async def run() -> None:
        (slot,) = await slots.reserve(1, name="worker")
        engine = await start_engine(slot, CONFIG, "fake", 1)
        local = await FakeEngine(CONFIG).sample(REQUEST)
        np.testing.assert_array_equal((await engine.sample(REQUEST)).sequences[0].tokens, local.sequences[0].tokens)
        first = slot.process
        assert first is not None
        assert first.pid == engine.pid != os.getpid()
        os.kill(engine.pid, signal.SIGKILL)
        await asyncio.wait_for(engine.died.wait(), 120)
        await asyncio.wait_for(first.died.wait(), 120)
        assert first.code == -signal.SIGKILL
        assert engine.end is not None
        assert engine.end.from_outside
        with pytest.raises(EngineDied):
            await engine.sample(REQUEST)
        again = await start_engine(slot, CONFIG, "fake", 2)
        assert slot.process is not None
        assert slot.process.pid == again.pid
        assert again.pid != first.pid
        os.kill(again.pid, signal.SIGSTOP)
        await asyncio.wait_for(slot.end(), 120)  # confirmed, although it was stopped
        assert not psutil.pid_exists(again.pid)
        await engine.close()
        await again.close()

    wait(run())


def test_process_ends_with_a_killed_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    assert psutil.wait_procs([child], timeout=120)[1] == []


SLOW = """
import os, time
from pathlib import Path
Path(os.environ["SLOW_FILE"]).write_text(str(os.getpid()))
time.sleep(600)
"""


def test_process_that_still_imports_ends_with_a_killed_parent(tmp_path: Path) -> None:
    """Fails if `start_child` runs the module itself: torch takes seconds to import, on a busy machine tens of them."""
    (tmp_path / "slow_program.py").write_text(SLOW)
    file = tmp_path / "pid"
    environment = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), "SLOW_FILE": str(file)}
    program = (
        "import asyncio; from tinsmith.engine.processes.slots import Program, LocalSlots;"
        f"start = lambda slots: slots[0].start(Program(module='slow_program', environment={environment!r}), 1);"
        "run = lambda: LocalSlots().reserve(1, name='worker');"
        "loop = asyncio.new_event_loop(); process = loop.run_until_complete(start(loop.run_until_complete(run())));"
        "loop.run_forever()"
    )
    with subprocess.Popen([sys.executable, "-c", program]) as parent:
        end = time.monotonic() + 240
        while not (file.is_file() and file.read_text()):
            assert time.monotonic() < end
            time.sleep(0.02)
        child = psutil.Process(int(file.read_text()))
        parent.kill()
    assert psutil.wait_procs([child], timeout=120)[1] == []


IMPATIENT = """
from tinsmith.engine.processes import dial
from tinsmith.engine.processes.worker import open_link
dial.SILENCE_S = 1
link, _ = open_link()
link.receive()
"""


@pytest.mark.parametrize("identity", [None, Identity.new()], ids=["plain", "TLS"])
def test_process_that_hears_nothing_ends(identity: Identity | None, tmp_path: Path, wait: Any) -> None:
    """Fails without a limit of silence: a machine that is gone without a word closes no connection."""
    (tmp_path / "impatient.py").write_text(IMPATIENT)
    environment = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}

    async def run() -> None:
        slot = LocalSlot("worker", (), identity, over_tcp=True)
        process = await slot.start(Program(module="impatient", environment=environment), 1)
        _, writer = await process.connect(1 << 16)
        await asyncio.wait_for(process.died.wait(), 120)  # the connection is open
        assert process.code == 0
        writer.close()

    wait(run())


def test_program_that_does_not_start_is_named(wait: Any, slots: LocalSlots, tmp_path: Path) -> None:
    (slot,) = wait(slots.reserve(1, name="worker"))
    with (tmp_path / "log").open("wb") as log:
        program, launch_token = Program(module="tinsmith.no_such_module"), new_launch_token(slot)
        with pytest.raises(EngineDied, match=r"no_such_module did not start \(exit status 1\)"):
            wait(start_listening(program, launch_token, (), log.fileno()))
    assert "No module named" in (tmp_path / "log").read_text()


def new_launch_token(slot: Any) -> Any:
    from tinsmith.engine.processes.dial import LaunchToken

    assert isinstance(slot, LocalSlot)
    return LaunchToken.new(1, slot.host)


def test_gpus_are_given_once_and_come_back(wait: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,7")
    assert visible_gpus() == ["3", "5", "7"]
    slots = LocalSlots()
    first, second = wait(slots.reserve(2, name="rank", gpus=1))
    assert (first.gpus, second.gpus) == (("3",), ("5",))
    with pytest.raises(ConfigError, match="2 processes with 1 GPU each; this machine has"):
        wait(slots.reserve(2, name="sampler", gpus=1))
    wait(slots.give_back([first]))
    assert [slot.gpus for slot in wait(slots.reserve(2, name="sampler", gpus=1))] == [("7",), ("3",)]
