"""A fork shares memory with its source; neither changes the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.data import pass_for
from tests.engine.training.test_optimizer import same, state
from tinsmith.engine.base import AdamParams, LoraSpec
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.fake.engine import FakeEngine

ADAM = AdamParams(learning_rate=0.05)


def train(engine: Any, wait: Any, name: str, seed: int) -> None:
    wait(engine.run([pass_for("cross_entropy", name, seed=seed)]))
    wait(engine.step(name, ADAM))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("saved", [False, True], ids=["live", "saved"])
@pytest.mark.parametrize("optimizer", [False, True], ids=["fresh", "inherit"])
def test_fork_steps_as_a_loaded_model_would(
    engine_of: Any, wait: Any, tmp_path: Path, model_id: str, dtype: str, saved: bool, optimizer: bool
) -> None:
    engine, fork, loaded = engine_of("llama", dtype=dtype), f"{model_id}-fork", f"{model_id}-loaded"
    wait(engine.create(model_id, LoraSpec(rank=4, seed=1)))
    train(engine, wait, model_id, 0)
    folder = tmp_path / "saved"
    wait(engine.save(model_id, folder, optimizer=True))
    wait(engine.run([pass_for("cross_entropy", model_id, seed=8)]))  # a pending gradient, which no fork has
    parent = state(engine, wait, model_id, tmp_path / "before")
    wait(engine.fork(fork, folder if saved else model_id, optimizer=optimizer))
    wait(engine.load(loaded, folder, optimizer=optimizer))
    for step, seed in enumerate((1, 2)):
        train(engine, wait, fork, seed)
        train(engine, wait, loaded, seed)
        assert same(*(state(engine, wait, name, tmp_path / f"{name}-{step}") for name in (fork, loaded)))
    assert same(parent, state(engine, wait, model_id, tmp_path / "after"))
    for name in (model_id, fork, loaded):
        wait(engine.drop(name))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fork_does_not_change_with_its_source(
    engine_of: Any, wait: Any, tmp_path: Path, model_id: str, dtype: str
) -> None:
    engine, forks = engine_of("llama", dtype=dtype), [f"{model_id}-{number}" for number in range(3)]
    wait(engine.create(model_id, LoraSpec(rank=4, seed=1)))
    train(engine, wait, model_id, 0)
    wait(engine.fork(forks[0], model_id, optimizer=False))
    wait(engine.fork(forks[1], forks[0], optimizer=False))
    before = state(engine, wait, forks[0], tmp_path / "before")
    for seed in range(1, 4):
        train(engine, wait, model_id, seed)
        wait(engine.capture(model_id, f"{model_id}-version"))
        wait(engine.fork(forks[2], model_id, optimizer=False))
        train(engine, wait, forks[2], seed)
    wait(engine.drop(model_id))
    for number in (0, 1):
        assert same(before, state(engine, wait, forks[number], tmp_path / f"after-{number}"))
    wait(engine.detach(f"{model_id}-version"))
    for name in forks:
        wait(engine.drop(name))


def test_fork_allocates_no_weights(engine: Any, wait: Any, model_id: str) -> None:
    wait(engine.create(model_id, LoraSpec(rank=4, seed=1)))
    size = wait(engine.fork(f"{model_id}-fork", model_id, optimizer=False))
    parent, fork = (engine.trainer._models[name] for name in (model_id, f"{model_id}-fork"))
    assert size == parent.master.numel()
    assert parent.master.data_ptr() == fork.master.data_ptr()
    wait(engine.drop(model_id))
    wait(engine.drop(f"{model_id}-fork"))


def test_fake_engine_forks_like_the_real_one(wait: Any, tmp_path: Path) -> None:
    engine = FakeEngine(EngineConfig(source="fake", kind="fake"))
    wait(engine.create("parent", LoraSpec(rank=2, seed=1)))
    train(engine, wait, "parent", 0)
    wait(engine.save("parent", tmp_path / "saved", optimizer=True))
    wait(engine.fork("live", "parent", optimizer=True))
    wait(engine.fork("saved", tmp_path / "saved", optimizer=True))
    train(engine, wait, "parent", 1)
    for name in ("live", "saved"):
        train(engine, wait, name, 1)
        assert np.array_equal(engine._models[name].weights.a, engine._models["parent"].weights.a)
        assert np.array_equal(engine._models[name].weights.b, engine._models["parent"].weights.b)
