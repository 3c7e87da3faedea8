"""Programs that are forks of a process with their imports: what they are given, how they end, and with whom."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from tinsmith.errors import TinsmithError
from tinsmith.processes.forks import ForkedChild, ForkServer

pytestmark = pytest.mark.e2e

OWNER = f"""
import time
from tinsmith.processes.forks import ForkServer
forks = ForkServer("{__name__}:preload")
child = forks.start("{__name__}:wait_for_ever", log=1)
time.sleep(600)
"""


def preload() -> None:
    """What every program finds made."""
    os.environ["PRELOADED"] = "in the server alone"
    vars(sys)["preloaded"] = True


def describe() -> None:
    """A program that prints what it was given."""
    values = [*sys.argv[1:], os.environ["GIVEN"], os.environ.get("PRELOADED"), os.getcwd(), vars(sys)["preloaded"]]
    print(*values, os.getsid(0) == os.getpid(), sorted(map(int, os.listdir("/proc/self/fd")))[:4])


def fail() -> None:
    """A program that fails."""
    raise KeyError("absent")


def refuse() -> None:
    """A program that ends with a code."""
    sys.exit(75)


def wait_for_ever() -> None:
    """A program that goes on until a signal ends it."""
    print(os.getpid(), flush=True)
    threading.Event().wait()


@pytest.fixture(scope="module")
def forks() -> Iterator[ForkServer]:
    with closing(ForkServer(f"{__name__}:preload")) as server:
        yield server


def started(forks: ForkServer, function: Callable[[], None], log: Path, *words: str) -> ForkedChild:
    with log.open("ab") as file:
        name = f"{__name__}:{function.__name__}"
        return forks.start(name, *words, environment={"GIVEN": "mine"}, log=file.fileno())


def ended(child: ForkedChild) -> int:
    while (code := child.poll()) is None:
        time.sleep(0.01)
    return code


def test_program_has_what_it_was_given_and_nothing_else(forks: ForkServer, tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert ended(started(forks, describe, log, "a b", "--c")) == 0
    # Standard input, output and error, and the folder that is being read.
    assert log.read_text() == f"a b --c mine None {os.getcwd()} True True [0, 1, 2, 3]\n"


def test_exit_codes_are_those_of_a_program(forks: ForkServer, tmp_path: Path) -> None:
    log = tmp_path / "log"
    children = [started(forks, program, log) for program in (fail, refuse)]
    assert [ended(child) for child in children] == [1, 75]
    assert [ended(child) for child in children] == [1, 75]  # again
    assert "KeyError: 'absent'" in log.read_text()
    for number, end in ((signal.SIGTERM, ForkedChild.terminate), (signal.SIGKILL, ForkedChild.kill)):
        child = started(forks, wait_for_ever, log)
        end(child)
        assert ended(child) == -number
        end(child)  # has no effect


def test_programs_end_with_their_server(tmp_path: Path) -> None:
    log = tmp_path / "log"
    forks = ForkServer(f"{__name__}:preload")
    child = started(forks, wait_for_ever, log)
    while not log.read_text():
        time.sleep(0.01)
    program = psutil.Process(int(log.read_text()))
    forks.close()
    assert psutil.wait_procs([program], timeout=100)[1] == []
    assert ended(child) == -signal.SIGKILL
    with pytest.raises(TinsmithError, match="has ended"):
        started(forks, describe, log)


def test_programs_end_with_a_process_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        program = psutil.Process(int(owner.stdout.readline()))
        family = [program, *program.parents()[:1]]
        owner.kill()
    assert psutil.wait_procs(family, timeout=100)[1] == []


def test_preload_that_fails_is_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    with (
        closing(ForkServer("tests.processes.absent:preload")) as forks,
        pytest.raises(TinsmithError, match="has ended"),
    ):
        forks.start("tests.processes.absent:main", log=1)
    assert "tests.processes.absent" in capfd.readouterr().err
