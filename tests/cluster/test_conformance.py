"""Every public method of the SDK against two training and two sampling processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conformance import cases_clients, cases_rest, cases_sampling, cases_training
from tests.conformance.catalog import case_of, methods
from tests.conformance.conftest import connected
from tests.conformance.world import World
from tinsmith.engine.cluster.config import ClusterConfig
from tinsmith.service.config import ServeConfig
from tinsmith.service.embedded import embedded

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore:DEPRECATED"),
    pytest.mark.timeout(1200),
]
CASES = (cases_clients, cases_rest, cases_sampling, cases_training)
"""Modules that register the case of each method."""
PLACES = ["this machine", "Ray"]


@pytest.fixture(scope="module", params=PLACES)
def address(request: pytest.FixtureRequest) -> str | None:
    """Of the Ray cluster; None for this machine without Ray."""
    return None if request.param == "this machine" else request.getfixturevalue("ray_cluster").address


@pytest.fixture(scope="module")
def world(address: str | None, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A service with a tiny model in float32."""
    config = ServeConfig(
        models=(f"tiny={tiny_llama}",),
        data=tmp_path_factory.mktemp("data"),
        device="cpu",
        dtype="float32",
        threads=1,
        cluster=ClusterConfig(address=address, trainers=2, samplers=2),
    )
    with embedded(config) as (url, key):
        yield connected(url, key, "tiny")


@pytest.mark.parametrize("method", methods())
def test_method_on_a_cluster(method: str, world: World) -> None:
    case, is_async, through_future = case_of(method)
    assert case is not None
    case(replace(world, is_async=is_async, through_future=through_future))
