"""The checks of `make check` apart from tests/test_gates.py: style, types and import contracts."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
CODE = ["src", "tests", "benchmarks", "examples", "tools"]


@pytest.mark.parametrize(
    "command",
    [
        ["ruff", "format", "--check", *CODE],
        ["ruff", "check", *CODE],
        ["pyright", "--pythonpath", sys.executable],
        ["lint-imports"],
    ],
    ids=lambda command: " ".join(command[:2]),
)
@pytest.mark.timeout(900)
def test_check_passes(command: list[str]) -> None:
    done = subprocess.run([BIN / command[0], *command[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
