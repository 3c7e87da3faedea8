"""What tests of any room may ask for: tiny base models on disk, and SmolLM2 where its file is."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest_plugins = ["tests.conformance.summary"]

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Clients outlive the servers of their tests, and would tell the terminal so, between tests, until the process ends.
logging.getLogger("tinker.lib.internal_client_holder").addHandler(logging.NullHandler())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--database",
        choices=["sqlite", "postgresql"],
        help="of every test of the service; without it SQLite, and both where the database itself is tested",
    )


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny base model by its kind (see tests.models.KINDS); made once."""
    made: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in made:
            from tests.models import save_model  # torch takes seconds to import; most rooms do without

            made[kind] = save_model(kind, tmp_path_factory.mktemp(f"tiny-{kind}"))
        return made[kind]

    return folder


@pytest.fixture(scope="session")
def tiny_llama(tiny: Callable[[str], Path]) -> Path:
    """The folder of the tiny Llama."""
    return tiny("llama")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct, as `tinsmith serve` finds it: converted once and cached."""
    program = (
        "from tinsmith.engine.config import DEFAULT_MODEL; from tinsmith.engine.model.sources import locate;"
        "print(locate(DEFAULT_MODEL).folder)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return Path(done.stdout.split()[-1])
