"""Fixtures: engines on tiny base models, adapters, and an event loop to run coroutines in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.engine.data import pass_for
from tinsmith.engine.base import AdamParams, LoraSpec
from tinsmith.engine.config import EngineConfig

Wait = Callable[[Coroutine[Any, Any, Any]], Any]

_numbers = count()


@pytest.fixture(scope="session")
def wait() -> Iterator[Wait]:
    """Runs a coroutine to its end, always in the same event loop."""
    with asyncio.Runner() as runner:
        yield runner.run


@contextmanager
def engines(folder_of: Callable[[str], Path], wait: Wait) -> Iterator[Callable[..., Any]]:
    """A float32 engine on the CPU by the kind of its base model, created once for each combination of settings."""
    from tinsmith.engine.build import build  # imports torch

    made: dict[Any, Any] = {}

    def engine(kind: str, **settings: Any) -> Any:
        key = (kind, *sorted(settings.items()))
        if key not in made:
            options = {"dtype": "float32", "device": "cpu", "threads": 1, **settings}
            made[key] = build(EngineConfig(source=str(folder_of(kind)), **options))
        return made[key]

    yield engine
    for engine in made.values():
        wait(engine.close())


@pytest.fixture(scope="session")
def engine_of(tiny: Callable[[str], Path], wait: Wait) -> Iterator[Callable[..., Any]]:
    """Engines on the tiny base models."""
    with engines(tiny, wait) as engine:
        yield engine


@pytest.fixture(scope="session")
def engine(engine_of: Callable[..., Any]) -> Any:
    """The engine on the tiny Llama."""
    return engine_of("llama")


@pytest.fixture
def model_id() -> str:
    """A unique model id."""
    return f"model-{next(_numbers)}"


@pytest.fixture
def cache_scope(model_id: str) -> str:
    """A cache scope that no other test uses."""
    return f"space-of-{model_id}"


@pytest.fixture(scope="session")
def adapter_of(
    engine_of: Callable[..., Any], wait: Wait, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """A folder with an adapter that was trained for a few steps, so that B is not zero; created once for each spec."""
    made: dict[Any, Path] = {}

    def adapter(kind: str = "llama", lora: LoraSpec | None = None) -> Path:
        key = (kind, lora := lora or LoraSpec(rank=4, seed=1))
        if key not in made:
            engine, made[key] = engine_of(kind), tmp_path_factory.mktemp("adapter") / "saved"
            wait(engine.create("temporary", lora))
            for seed in range(3):
                wait(engine.run([pass_for("cross_entropy", "temporary", seed=1000 + seed)]))
                wait(engine.step("temporary", AdamParams(learning_rate=0.02, eps=1e-8)))
            wait(engine.save("temporary", made[key], optimizer=False))
            wait(engine.drop("temporary"))
        return made[key]

    return adapter


class Oracles:
    """The oracles of adapters of `adapter_of`. PEFT takes long to load one, so tests give them back."""

    def __init__(self, load: Callable[..., Any]) -> None:
        self._load = load
        self._free: dict[Any, list[Any]] = {}

    def take(self, kind: str, lora: LoraSpec | None) -> Any:
        """One as it was loaded, which no other test has."""
        free = self._free.setdefault((kind, lora), [])
        return free.pop() if free else self._load(kind, lora)

    def give_back(self, kind: str, lora: LoraSpec | None, oracle: Any) -> None:
        oracle.reset()
        self._free[kind, lora].append(oracle)


@pytest.fixture(scope="session")
def oracles(tiny: Callable[[str], Path], adapter_of: Callable[..., Path]) -> Oracles:
    """The oracles of the tests of a process."""
    from tests.engine.reference import Reference

    return Oracles(lambda kind, lora: Reference(tiny(kind), adapter_of(kind, lora)))


@pytest.fixture
def pair(
    engine_of: Callable[..., Any],
    oracles: Oracles,
    adapter_of: Callable[..., Path],
    wait: Wait,
    model_id: str,
) -> Iterator[Callable[..., Any]]:
    """The same adapter as a model of the engine and in the oracle: returns engine, model id, oracle."""
    opened: list[tuple[Any, str, tuple[Any, ...]]] = []

    def make(kind: str = "llama", lora: LoraSpec | None = None, **settings: Any) -> Any:
        folder, engine = adapter_of(kind, lora), engine_of(kind, **settings)
        name = f"{model_id}-{len(opened)}"
        wait(engine.load(name, folder, optimizer=False))
        oracle = oracles.take(kind, lora)
        opened.append((engine, name, (kind, lora, oracle)))
        return engine, name, oracle

    yield make
    for engine, name, taken in opened:
        wait(engine.drop(name))
        oracles.give_back(*taken)
