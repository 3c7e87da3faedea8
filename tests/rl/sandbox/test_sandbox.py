"""Programs in the sandbox: output, limits, and what they cannot reach."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tinsmith.errors import ConfigError
from tinsmith.processes.start import start_program
from tinsmith.rl.sandbox import execution
from tinsmith.rl.sandbox.config import SandboxConfig
from tinsmith.rl.sandbox.execution import Execution, execute

HAS_NAMESPACES = (
    subprocess.run(["unshare", "--user", "--map-root-user", "--net", "--mount", "--pid", "--fork", "true"]).returncode
    == 0
    if shutil.which("unshare")
    else False
)
needs_namespaces = pytest.mark.skipif(not HAS_NAMESPACES, reason="the kernel grants no namespaces")


def run(source: str, *, stdin: str = "", show_value: bool = False, **settings: object) -> Execution:
    return execute([("program.py", source)], settings, stdin=stdin, show_value=show_value)


def test_output_and_input_are_those_of_the_program():
    execution = run("import sys\nprint(sys.stdin.read()[::-1])\n3 * 4", stdin="olleh ö", show_value=True)
    assert execution == Execution(output="ö hello\n12\n", errors="", ending="done", completed=True)


def test_exception_shows_its_line_of_the_program():
    execution = run("def f(x):\n    return 1 / x\nf(0)")
    assert (execution.ending, execution.completed) == ("error", False)
    assert execution.errors.splitlines() == [
        "Traceback (most recent call last):",
        '  File "program.py", line 3, in <module>',
        "    f(0)",
        '  File "program.py", line 2, in f',
        "    return 1 / x",
        "           ~~^~~",
        "ZeroDivisionError: division by zero",
    ]


@pytest.mark.parametrize("source", ["import sys; sys.exit(0)", "import os; os._exit(0)"])
def test_program_that_exits_early_has_not_completed(source):
    execution = run(source)
    assert (execution.ending, execution.completed) == ("done", False)


@pytest.mark.parametrize(
    ("source", "settings", "ending"),
    [
        ("while True: pass", {"timeout": 0.1}, "timeout"),
        ("import sys; sys.stdout.close(); sys.stderr.close()\nwhile True: pass", {"timeout": 0.1}, "timeout"),
        ("while True: print('x' * 1000)", {"output_kb": 4}, "output"),
        ("x = bytearray(1 << 30)", {"memory_mb": 200}, "error"),
        ("open('big', 'wb').write(bytes(2 << 20))", {"disk_mb": 1}, "error"),
    ],
    ids=["time", "time-closed", "output", "memory", "disk"],
)
def test_limits_end_a_program(source, settings, ending):
    execution = run(source, **settings)
    assert (execution.ending, execution.completed) == (ending, False)


def test_program_inherits_no_variables_and_no_folder(monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "hidden")
    execution = run("import os\nprint('SECRET_KEY' in os.environ, os.listdir('.'), os.getcwd() == os.environ['HOME'])")
    assert execution.output == "False [] True\n"


@needs_namespaces
def test_program_reaches_no_file_process_or_network(tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("hidden")
    secret.chmod(0o644)
    source = f"""
import os, socket
print(os.path.exists({str(secret)!r}), os.path.exists("/proc/{os.getpid()}/environ"), os.path.exists("/etc/passwd"))
for attempt in (
    lambda: socket.create_connection(("127.0.0.1", 1)),
    lambda: open("/usr/new", "w"),
    lambda: [os.fork() or os.kill(os.getpid(), 19) for _ in range(100)],
):
    try:
        attempt()
    except OSError as error:
        print(error.errno)
"""
    assert run(source, strict=True).output.splitlines() == ["False False False", "101", "30", "11"]


@needs_namespaces
def test_processes_of_a_program_end_with_it():
    source = (
        "import subprocess, sys; print(subprocess.Popen(['sleep', '987654'], start_new_session=True) and 'started')"
    )
    assert run(source, strict=True).output == "started\n"
    commands = [path for path in Path("/proc").glob("[0-9]*/cmdline") if "987654" in _text(path)]
    assert commands == []


def test_limits_hold_where_the_kernel_grants_no_namespaces(monkeypatch):
    def start(command, limits):
        source = "from tinsmith.processes import confine; confine._enter_namespaces = lambda: False; confine.main()"
        return start_program([sys.executable, "-c", source, limits, *command])

    monkeypatch.setattr(execution, "start_confined", start)
    assert run("import os; print(len(os.environ), os.listdir('.'))").output == "7 []\n"
    assert run("while True: pass", timeout=0.1).ending == "timeout"
    with pytest.raises(ConfigError, match=r"sandbox\.strict: the kernel of this machine grants no namespaces"):
        run("1", strict=True)


def test_container_has_no_network_and_ends_with_its_program(tmp_path, monkeypatch):
    docker, source = tmp_path / "docker", Path(execution.__file__).with_name("program.py")
    docker.write_text(
        f'#!/bin/sh\necho "$1" "$5" "$*" | head -n 1 >> "{tmp_path}/calls"\n'
        f'[ "$1" = kill ] || exec "{sys.executable}" -I "{source}"\n'
    )
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert run("print(5)", kind="docker", image="an-image").output == "5\n"
    started, killed = (line.split() for line in (tmp_path / "calls").read_text().splitlines())
    assert {"--network", "none", "--read-only", "--cap-drop", "an-image"} <= set(started)
    assert killed == ["kill", "kill", started[1]]


def test_missing_container_program_is_refused_by_name(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match="there is no program podman on this machine"):
        SandboxConfig(kind="podman")


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def test_private_umask_hides_nothing_from_the_program():
    before = os.umask(0o077)
    try:
        assert run("print(1)").output == "1\n"
    finally:
        os.umask(before)
