"""test_legacy.py with old versions of verifiers, each in a venv of its own that shares the packages of this one."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.versions.venvs import python_with

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent


@pytest.mark.parametrize("version", ["0.1.9", "0.3.1"])
def test_old_version_runs_environments(version):
    command = [
        str(python_with("verifiers", version)),
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        str(HERE / "test_legacy.py"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, cwd=HERE.parents[2])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "passed" in done.stdout
    assert "skipped" not in done.stdout
