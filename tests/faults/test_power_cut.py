"""What was answered before a power cut is there after it, whatever unsynced writes the disk has lost."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.power.disk import Disk
from tests.faults.power.recovery import cuts, violations
from tests.faults.power.session import Recording, record
from tests.faults.power.trace import Operation, read_trace, strace_command
from tests.faults.report import write_power_report

pytestmark = pytest.mark.e2e

SEED = 16

needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace (apt-get install strace)")


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    return record(tmp_path_factory.mktemp("recorded"), steps=6, models=2)


@needs_strace
def test_power_cut_loses_nothing_acknowledged(recording: Recording, tmp_path: Path) -> None:
    """Fails without a sync in atomic_folder or atomic_write, or with synchronous=NORMAL in `_configure_sqlite`."""
    assert list(violations(recording, list(cuts(recording, 20, SEED)), tmp_path)) == []


@needs_strace
@pytest.mark.faults
def test_every_place_of_a_power_cut(recording: Recording, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    option = request.config.getoption
    planned = list(cuts(recording, option("--cuts"), option("--seed")))
    seen = list(violations(recording, planned, tmp_path))
    if option("--add"):
        write_power_report(recording, planned, seen)
    assert seen == []


@needs_strace
def test_trace_is_what_the_program_did(tmp_path: Path) -> None:
    program = """
import os
data = os.path.abspath("data")
a, b, c, d = (f"{data}/{name}" for name in ("a", "d/b", "c", "d"))
with open(a, "wb") as file:
    file.write(b"one")
    file.flush()
    os.fsync(file.fileno())
    file.write(b"two")
    file.flush()
    file.truncate(5)
os.mkdir(d)
os.rename(a, b)
file = os.open(b, os.O_WRONLY | os.O_APPEND)
os.write(file, b"end")
os.link(b, c)
os.unlink(b)
os.fsync(os.open(d, os.O_RDONLY))
os.rmdir(d)
"""
    data, log = tmp_path / "data", tmp_path / "log"
    data.mkdir()
    subprocess.run([*strace_command(log), sys.executable, "-c", program], cwd=tmp_path, check=True)
    expected = [
        operation("create", "a"),
        operation("write", "a", data=b"one"),
        operation("sync", "a"),
        operation("write", "a", offset=3, data=b"two"),
        operation("resize", "a", offset=5),
        operation("mkdir", "d"),
        operation("rename", "a", to="d/b"),
        operation("write", "d/b", offset=5, data=b"end"),
        operation("link", "d/b", to="c"),
        operation("unlink", "d/b"),
        operation("sync", "d"),
        operation("rmdir", "d"),
    ]
    assert [operation(o.kind, o.path, to=o.to, offset=o.offset, data=o.data) for o in read_trace(log, data)] == expected
    disk = Disk()
    disk.apply(expected)
    disk.cut(tmp_path / "whole", "nothing", random.Random(0))
    assert {file.name: file.read_bytes() for file in (tmp_path / "whole").iterdir()} == {"c": b"onetwend"}
    disk.cut(tmp_path / "lost", "unsynced", random.Random(0))
    assert list((tmp_path / "lost").iterdir()) == []


def test_disk_loses_pages_and_names_since_their_sync(tmp_path: Path) -> None:
    disk = Disk()
    disk.apply(
        [
            operation("create", "a"),
            operation("write", "a", data=b"x" * 8192),
            operation("sync", "a"),
            operation("sync", "."),
            operation("write", "a", data=b"y" * 8192),
            operation("rename", "a", to="b"),
        ]
    )
    seen = set()
    for seed in range(200):
        folder = tmp_path / str(seed)
        disk.cut(folder, "some", random.Random(seed))
        [file] = folder.iterdir()
        content = file.read_bytes()
        seen.add((file.name, content[:1], content[-1:], len(content)))
    assert seen == {(name, first, last, 8192) for name in "ab" for first in (b"x", b"y") for last in (b"x", b"y")}


def operation(kind: str, path: str, *, to: str = "", offset: int = 0, data: bytes = b"") -> Operation:
    return Operation(kind=kind, path=path, to=to, offset=offset, data=data, at=0.0)  # type: ignore[arg-type]
