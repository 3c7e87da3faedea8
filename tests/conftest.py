"""What tests of any room may ask for: tiny base models on disk, and SmolLM2 where its file is."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


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
