"""Peak memory of a pass does not grow with the number of its rows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.training.peak_memory import LENGTH, save_model

pytestmark = pytest.mark.slow

BYTES_PER_TOKEN = 12
"""Memory of a running request: a logprob, a flag for its gradient, and a copy of its id for sorting."""
SLACK = 48 * 2**20
"""Tolerance for the allocator."""


def test_peak_memory_is_independent_of_row_count(tmp_path: Path):
    counts = ("256", "1024", "4096")
    program = [sys.executable, "-m", "tests.engine.training.peak_memory", str(save_model(tmp_path / "model")), *counts]
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=3000)
    assert done.returncode == 0, done.stderr
    lines = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert [(count, results) for count, _, results in lines] == [(int(count), int(count)) for count in counts]
    [(fewest, least, _), *more] = lines
    for count, most, _ in more:
        assert most - least <= BYTES_PER_TOKEN * LENGTH * (count - fewest) + SLACK, lines
