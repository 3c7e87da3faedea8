"""test_legacy.py with old versions of verifiers, each in a venv of its own that shares the packages of this one."""

from __future__ import annotations

import site
import subprocess
import sys
from pathlib import Path

import pytest

from tests import certificates
from tinsmith.engine.config import cache_folder

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent


def python_with(version: str) -> Path:
    """The interpreter of a venv with this version, created if missing."""
    folder = cache_folder() / "verifiers" / version
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)], check=True)
        [packages] = folder.glob("lib/python*/site-packages")
        (packages / "shared.pth").write_text(f"{site.getsitepackages()[0]}\n")  # listed last, so the venv's come first
        install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
        subprocess.run([*install, f"verifiers=={version}"], env=certificates.SYSTEM, check=True)
        (folder / "ready").touch()
    return python


@pytest.mark.parametrize("version", ["0.1.9", "0.3.1"])
def test_old_version_runs_environments(version):
    command = [str(python_with(version)), "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "test_legacy.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, cwd=HERE.parents[2])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "passed" in done.stdout
    assert "skipped" not in done.stdout
