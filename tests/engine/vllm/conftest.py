"""A stand-in for the Python of vLLM's environment."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.engine.vllm import stub


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program that runs the stub of vLLM."""
    script = tmp_path_factory.mktemp("venv-vllm") / "python"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} {stub.__file__} "$@"\n')
    script.chmod(0o755)
    return script
