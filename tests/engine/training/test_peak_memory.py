"""Thousands of long rows in one request stream through: memory grows by what is given back for them, and no more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.training.peak_memory import LENGTH, save_model

pytestmark = pytest.mark.slow

KEPT = 12
"""Bytes for each token of a running request: a logprob, a mark whether it learns, its id once more to sort by."""
SLACK = 48 * 2**20
"""Of the allocator."""


def test_memory_does_not_grow_with_the_number_of_rows(tmp_path: Path):
    counts = ("256", "1024", "4096")
    program = [sys.executable, "-m", "tests.engine.training.peak_memory", str(save_model(tmp_path / "model")), *counts]
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=3000)
    assert done.returncode == 0, done.stderr
    found = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert [(count, results) for count, _, results in found] == [(int(count), int(count)) for count in counts]
    [(fewest, least, _), *more] = found
    for count, most, _ in more:
        assert most - least <= KEPT * LENGTH * (count - fewest) + SLACK, found
