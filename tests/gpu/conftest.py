"""Fixtures of the tests that need a GPU, which run without the packages of the service:

python -m pytest -m gpu --confcutdir tests/gpu tests/gpu
"""

from __future__ import annotations

import pytest

from tests.conftest import smollm2, tiny, tiny_llama
from tests.engine.conftest import adapter_of, engine_of, model_id, pair, wait

__all__ = ["adapter_of", "engine_of", "model_id", "pair", "smollm2", "tiny", "tiny_llama", "wait"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: try out the tests themselves")


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> str:
    """The device under test."""
    return str(pytestconfig.getoption("--device", default="cuda"))
