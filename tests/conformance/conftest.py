"""Conformance tests of any Tinker API server: `pytest tests/conformance --url URL --key KEY [--model NAME]`.

Without --url the tests start a service with the fake engine. `world` is the server under test, `real` a service with a
tiny model, `outcomes` collects refused methods for summary.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tinker

from tests.conformance.summary import OUTCOMES
from tests.conformance.world import World
from tinsmith.service.config import ServeConfig
from tinsmith.service.embedded import embedded


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance")
    group.addoption("--url", help="base URL of the server under test")
    group.addoption("--key", help="its key, tml-…", default="tml-dummy")
    group.addoption("--model", help="base model to train; the first of its capabilities if not given")


@pytest.fixture(scope="session")
def outcomes(pytestconfig: pytest.Config) -> dict[str, str]:
    """Reason of refusal by method, empty if it is supported."""
    return pytestconfig.stash[OUTCOMES]


@pytest.fixture(scope="session")
def world(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory, tiny: Callable[[str], Path]
) -> Iterator[World]:
    """The server under test."""
    url = pytestconfig.getoption("--url", None)
    if url:
        yield connected(url, pytestconfig.getoption("--key"), pytestconfig.getoption("--model"))
        return
    data = tmp_path_factory.mktemp("conformance")
    config = ServeConfig(models=(f"tiny={tiny('llama')}",), engine="fake", data=data)
    with embedded(config) as (url, key):
        yield connected(url, key, "tiny", is_ours=True)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory, tiny: Callable[[str], Path]) -> Iterator[World]:
    """A service with a tiny model of random weights, in float32, so that samples do not depend on the KV cache."""
    config = ServeConfig(
        models=(f"tiny={tiny('llama')}",), threads=1, dtype="float32", data=tmp_path_factory.mktemp("real")
    )
    with embedded(config) as (url, key):
        yield connected(url, key, "tiny")


def connected(url: str, key: str, model: str | None, *, is_ours: bool = False) -> World:
    """The server at a URL, with clients."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        service = tinker.ServiceClient(base_url=url, api_key=key)
        models = service.get_server_capabilities().supported_models
        return World(
            url=url,
            key=key,
            model=model or str(models[0].model_name),
            is_ours=is_ours,
            service=service,
            rest=tinker.RestClient(base_url=url, api_key=key),
            admin=tinker.AdminClient(base_url=url, api_key=key),
        )
