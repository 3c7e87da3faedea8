"""What several tests of the harness look at."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rl.scripted_run import run, settings


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that went to its end without a break."""
    folder = tmp_path_factory.mktemp("finished") / "small"
    run(settings(folder, monitors=[{"type": "report"}]))
    return folder
