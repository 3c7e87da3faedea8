"""Versions share memory with their model, and no step, load or write changes them."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor, equal

from tests.engine.data import pass_for
from tests.engine.sampling.helpers import sample_request
from tinsmith.engine.base import AdamParams, LoraSpec
from tinsmith.engine.lora import peft


def weights_of(engine: Any, version: str) -> list[Tensor]:
    """The tensors that the version samples with."""
    return [tensor for pair in engine.sampler.versions.weights(version).pairs.values() for tensor in (pair.a, pair.b)]


async def train(engine: Any, model_id: str, seed: int) -> None:
    await engine.run([pass_for("cross_entropy", model_id, seed=seed)])
    await engine.step(model_id, AdamParams(learning_rate=0.05))


def read_file(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_versions_do_not_change_with_their_model(
    engine_of: Any, wait: Any, tmp_path: Path, model_id: str, dtype: str
) -> None:
    engine = engine_of("llama", dtype=dtype)

    async def main() -> None:
        await engine.create(model_id, LoraSpec(rank=4, seed=1))
        await train(engine, model_id, 0)
        await engine.save(model_id, tmp_path / "saved", optimizer=True)
        await engine.capture(model_id, "first")
        await engine.capture(model_id, "twin")
        copies = [tensor.clone() for tensor in weights_of(engine, "first")]
        await train(engine, model_id, 1)
        await engine.capture(model_id, "second")
        await train(engine, model_id, 2)
        await engine.load(model_id, tmp_path / "saved", optimizer=True)
        await train(engine, model_id, 1)
        await engine.save(model_id, tmp_path / "again", optimizer=True)
        await engine.drop(model_id)
        for name in ("first", "twin", "second"):
            await engine.persist(name, tmp_path / name)
        assert all(equal(left, right) for left, right in zip(weights_of(engine, "first"), copies, strict=True))
        first, second = read_file(tmp_path / "first"), read_file(tmp_path / "second")
        assert same(first, read_file(tmp_path / "saved"))
        assert same(first, read_file(tmp_path / "twin"))
        assert not same(first, second)
        assert same(second, read_file(tmp_path / "again"))  # as if it had never been captured
        for name in ("first", "twin", "second"):
            await engine.detach(name)

    wait(main())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_do_not_change_a_persisted_version(
    engine_of: Any, wait: Any, tmp_path: Path, model_id: str, dtype: str
) -> None:
    engine = engine_of("llama", dtype=dtype)

    async def main() -> None:
        await engine.create(model_id, LoraSpec(rank=4, seed=1))
        await train(engine, model_id, 0)
        await engine.capture(model_id, "one")
        copies = [tensor.clone() for tensor in weights_of(engine, "one")]
        await train(engine, model_id, 1)
        await engine.persist("one", tmp_path / "one")
        for number in (2, 3):
            await engine.capture(model_id, f"v{number}")
            await train(engine, model_id, number)
            await engine.detach(f"v{number}")
        assert all(equal(left, right) for left, right in zip(weights_of(engine, "one"), copies, strict=True))
        await engine.detach("one")

    wait(main())


def test_step_without_gradient_moves_by_its_moments(engine: Any, wait: Any, model_id: str) -> None:
    async def main() -> None:
        await engine.create(model_id, LoraSpec(rank=4, seed=1))
        await train(engine, model_id, 0)
        master = engine.trainer._models[model_id].master.detach()
        before = master.clone()
        metrics = await engine.step(model_id, AdamParams(learning_rate=0.05, grad_clip_norm=1.0))
        assert metrics["grad_norm"] == 0
        assert not equal(before, engine.trainer._models[model_id].master.detach())

    wait(main())


def test_capture_copies_nothing(engine: Any, wait: Any, model_id: str) -> None:
    async def main() -> None:
        await engine.create(model_id, LoraSpec(rank=4, seed=1))
        await engine.capture(model_id, "one")
        await engine.capture(model_id, "two")
        pairs = zip(weights_of(engine, "one"), weights_of(engine, "two"), strict=True)
        assert all(left.data_ptr() == right.data_ptr() for left, right in pairs)
        for name in ("one", "two"):
            await engine.detach(name)

    wait(main())


def test_memory_of_persisted_versions_is_reused(engine: Any, wait: Any, tmp_path: Path, model_id: str) -> None:
    async def main() -> None:
        await engine.create(model_id, LoraSpec(rank=4, seed=1))
        for number in range(6):
            await train(engine, model_id, number)
            await engine.capture(model_id, f"v{number}")
            await engine.save(model_id, tmp_path / f"wanted{number}", optimizer=False)
            if number % 2:  # two versions are unwritten at a time, and the newer is written first
                await engine.persist(f"v{number}", tmp_path / f"v{number}")
                await train(engine, model_id, 10 + number)
                await engine.persist(f"v{number - 1}", tmp_path / f"v{number - 1}")
        for number in range(6):
            assert same(read_file(tmp_path / f"v{number}"), read_file(tmp_path / f"wanted{number}"))
            await engine.detach(f"v{number}")
        model = engine.trainer._models[model_id]
        await engine.capture(model_id, "last")
        left = model.master.data_ptr()
        await train(engine, model_id, 7)
        assert model.master.data_ptr() != left
        await engine.detach("last")
        await engine.capture(model_id, "next")
        await train(engine, model_id, 8)
        assert model.master.data_ptr() == left
        await engine.detach("next")

    wait(main())


def test_sampling_and_training_continue_during_persist(
    engine: Any, wait: Any, tmp_path: Path, model_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, write = threading.Event(), peft.write

    def slow_write(*args: Any) -> int:
        assert go.wait(240)
        return write(*args)

    monkeypatch.setattr(peft, "write", slow_write)

    async def main() -> None:
        await engine.create(model_id, LoraSpec(rank=4, seed=1))
        await train(engine, model_id, 0)
        await engine.capture(model_id, "slow")
        expected = [tensor.clone() for tensor in weights_of(engine, "slow")]
        writing = asyncio.create_task(engine.persist("slow", tmp_path / "slow"))
        await asyncio.sleep(0.01)
        assert len((await engine.sample(sample_request(version="slow"))).sequences[0].tokens) == 16
        await train(engine, model_id, 1)
        assert not writing.done()
        await engine.detach("slow")
        go.set()
        assert await writing > 0
        await engine.attach("slow", tmp_path / "slow")
        assert all(equal(left, right) for left, right in zip(weights_of(engine, "slow"), expected, strict=True))
        await engine.detach("slow")

    wait(main())
