"""The systemd units: systemd accepts them, and the service's command serves and notifies as the unit expects."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.service.support.process import free_port

DEPLOY = Path(__file__).parents[2] / "deploy"
PROGRAM = "/opt/tinsmith/bin/tinsmith"


def setting(unit: str, name: str) -> str:
    """The last value of a setting of a unit."""
    return re.findall(rf"^{name}=(.*)$", (DEPLOY / unit).read_text(), re.MULTILINE)[-1]


@pytest.mark.parametrize("unit", ["tinsmith.service", "tinsmith-backup.service", "tinsmith-backup.timer"])
def test_systemd_accepts_the_unit(tmp_path: Path, unit: str) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed (apt-get install systemd)")
    program = tmp_path / "tinsmith"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    for file in DEPLOY.glob("tinsmith*.*"):
        (tmp_path / file.name).write_text(file.read_text().replace(PROGRAM, str(program)))
    checked = subprocess.run(
        ["systemd-analyze", "verify", tmp_path / unit], capture_output=True, text=True, timeout=100
    )
    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.usefixtures("forked_programs")
def test_command_of_the_unit_serves_and_notifies(tmp_path: Path) -> None:
    """Fails without `systemd.send(READY)`, `Notifier.run` or `_systemd.send(STOPPING)` in server.py."""
    settings = (DEPLOY / "service.yaml").read_text().replace("/var/lib/tinsmith", str(tmp_path / "data"))
    config = tmp_path / "service.yaml"
    config.write_text(f"{settings.replace('8000', str(free_port()))}engine: fake\n")
    command = setting("tinsmith.service", "ExecStart").replace("/etc/tinsmith/service.yaml", str(config))
    assert command.startswith(PROGRAM)
    words = [sys.executable, "-m", "tinsmith", *shlex.split(command)[1:]]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(100)
        environment = {**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "200000"}
        with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as server:
            states = [systemd.recv(100).decode()]
            while states.count("WATCHDOG=1") < 3 or "READY=1" not in states:
                states.append(systemd.recv(100).decode())
            server.send_signal(signal.SIGTERM)
            begun = time.monotonic()
            while states[-1] != "STOPPING=1":
                states.append(systemd.recv(100).decode())
            assert server.wait(float(setting("tinsmith.service", "TimeoutStopSec"))) == 0
            assert time.monotonic() - begun < 60
            assert server.stdout is not None
            assert server.stdout.read().startswith(b"TINKER_API_KEY=")  # which the unit keeps out of the journal
    assert setting("tinsmith.service", "StandardOutput") == "null"


def test_commands_of_the_backup_exist() -> None:
    """Each option of an ExecStart is one of the command's."""
    for line in re.findall(r"^ExecStart=(.*)$", (DEPLOY / "tinsmith-backup.service").read_text(), re.MULTILINE):
        words = shlex.split(line)[1:]
        shown = subprocess.run(
            [sys.executable, "-m", "tinsmith", words[0], "--help"], capture_output=True, text=True, check=True
        ).stdout
        assert all(word in shown for word in words if word.startswith("--"))
