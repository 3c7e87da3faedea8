"""Child processes end with their parent: by the watch of our own programs, and by the guard of another program."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from tinsmith.engine.vllm import guard

pytestmark = pytest.mark.e2e

WATCHING = """
import os, time
from tinsmith.processes.parent import watch_parent
watch_parent(lambda: os._exit(0), descriptor=0)
print("ready", flush=True)
time.sleep(600)
"""
FORKING = "import os, time; os.fork(); print('ready', flush=True); time.sleep(600)"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);" + FORKING
IMPATIENT = "from tinsmith.engine.vllm import guard; guard.GRACE_S = 0.1; guard.main()"

PARENT = """
import subprocess, sys, time
child = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    "command",
    [["-c", WATCHING], [guard.__file__, "-c", FORKING], ["-c", IMPATIENT, "-c", DEAF]],
    ids=["watch", "guard", "guard of a deaf program"],
)
def test_child_ends_when_its_parent_is_killed(command: list[str]) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, sys.executable, *command], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        family = [child, *child.children(recursive=True)]
        parent.kill()
    assert psutil.wait_procs(family, timeout=100)[1] == []


def test_children_of_a_guarded_program_end_with_it() -> None:
    command = [sys.executable, guard.__file__, "-c", FORKING]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as program:
        assert program.stdout is not None
        program.stdout.readline()
        children = psutil.Process(program.pid).children(recursive=True)
        assert len(children) == 2  # its own child, and the guard
        program.kill()
    assert psutil.wait_procs(children, timeout=100)[1] == []
