"""Fixtures shared by the tests of rl."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rl.scripted_run import run, settings


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of an uninterrupted run of 8 steps, with its report."""
    folder = tmp_path_factory.mktemp("finished") / "small"
    run(settings(folder, monitors=[{"type": "report"}]))
    return folder
