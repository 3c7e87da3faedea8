"""Methods of the SDK against a service with two front ends: the cases of tests/conformance, of each kind of request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conformance.catalog import case_of
from tests.conformance.conftest import connected
from tests.conformance.test_methods import REAL
from tests.conformance.world import World
from tinsmith.service.config import ServeConfig
from tinsmith.service.embedded import embedded

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
    pytest.mark.usefixtures("forked_programs"),
]

METHODS = (
    *REAL,
    "ServiceClient.get_server_capabilities", "RestClient.list_training_runs", "RestClient.delete_checkpoint",
)  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, tiny: Callable[[str], Path]) -> Iterator[World]:
    data = tmp_path_factory.mktemp("frontends")
    config = ServeConfig(models=(f"tiny={tiny('llama')}",), engine="fake", data=data, frontends=2)
    with embedded(config) as (url, key):
        yield connected(url, key, "tiny", is_ours=True)


@pytest.mark.parametrize("method", METHODS)
def test_method(method: str, world: World) -> None:
    case, _, _ = case_of(method)
    assert case is not None
    case(world)
