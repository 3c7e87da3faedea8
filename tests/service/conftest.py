"""Fixtures of the service tests.

`served` is a running service with a fake engine, one per module; `client` is an SDK client of it and `train` a training
client. `database` chooses SQLite or PostgreSQL. `datum` builds training data.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import tinker
from tinker import types

from tests.service.support.databases import SERVER, postgres, url_of
from tinsmith.service.config import ServeConfig
from tinsmith.service.embedded import embedded

ON_BOTH_DATABASES = {
    *("test_store", "test_writer", "test_retention", "test_database"),
    *("test_app", "test_journal", "test_keys", "test_snapshot"),
}
"""Test modules that run on SQLite and on PostgreSQL, unless --database chooses."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    chosen = metafunc.config.getoption("--database")
    kinds = ["sqlite", "postgresql"] if metafunc.module.__name__.rpartition(".")[2] in ON_BOTH_DATABASES else ["sqlite"]
    kinds = [chosen] if chosen else kinds
    if only := metafunc.definition.get_closest_marker("only_on"):
        kinds = [kind for kind in (kinds if chosen is None else ["sqlite", "postgresql"]) if kind in only.args]
    if kinds != ["sqlite"]:
        metafunc.parametrize("database", kinds, indirect=True, scope="module")


@pytest.fixture(scope="session")
def postgres_port() -> Iterator[str]:
    """Port of a PostgreSQL server of the test session."""
    with postgres() as port:
        yield port


@pytest.fixture(scope="module", autouse=True)
def database(request: pytest.FixtureRequest) -> Iterator[str]:
    """Kind of database that `databases.url_of` uses during the module."""
    kind = getattr(request, "param", "sqlite")
    with pytest.MonkeyPatch.context() as patch:
        if kind == "postgresql":
            patch.setenv(SERVER, request.getfixturevalue("postgres_port"))
        yield kind


@dataclass(frozen=True, slots=True)
class Served:
    """A running service: address, key and data folder."""

    url: str
    key: str
    data: Path

    @contextmanager
    def raw(self, key: str | None = None) -> Iterator[Callable[..., httpx.Response]]:
        """A function `call(path, body)` that sends plain HTTP: POST, or GET if the body is None."""
        headers = {"X-API-Key": self.key if key is None else key}
        with httpx.Client(base_url=f"{self.url}/api/v1/", headers=headers, timeout=40) as http:

            def call(path: str, body: object = None, **options) -> httpx.Response:
                if body is None:
                    return http.get(path, **options)
                content = body if isinstance(body, bytes) else json.dumps(body).encode()
                return http.post(path, content=content, **options)

            yield call


os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # fake engines with two threads on busy cores are 20 times slower


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, database: str, forked_programs: str) -> Iterator[Served]:
    """A service with a fake engine: models `toy`, `alias` (the same source) and `other/model`."""
    data = tmp_path_factory.mktemp("served")
    models = ("toy", "alias=toy", "other/model=else")
    config = ServeConfig(models=models, engine="fake", data=data, database=url_of(data))
    with embedded(config) as (url, key):
        yield Served(url, key, data)


@contextmanager
def served_by(engine: str, tiny_llama: Path, data: Path) -> Iterator[Served]:
    """A service of the model `toy`: with the fake engine, or with torch on the tiny Llama in float32."""
    source, device = "toy", {}
    if engine == "torch":
        source, device = f"toy={tiny_llama}", {"dtype": "float32", "threads": 1}
    options = {"engine": engine, **device}
    with embedded(ServeConfig(models=(source,), data=data, **options)) as (url, key):
        yield Served(url, key, data)


@pytest.fixture
def client(served: Served) -> Iterator[tinker.ServiceClient]:
    """An SDK client of `served`, closed after the test."""
    made = tinker.ServiceClient(base_url=served.url, api_key=served.key)
    yield made
    made.close("success").result()


def datum(tokens: list[int], **inputs: list[float]) -> types.Datum:
    """A datum that predicts each next token; `inputs` are further loss inputs."""
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], **inputs},
    )


@pytest.fixture
def train(client: tinker.ServiceClient) -> tinker.TrainingClient:
    """A training client of a rank-4 adapter on `toy`."""
    return client.create_lora_training_client("toy", rank=4, seed=1).result()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)
