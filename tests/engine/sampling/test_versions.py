"""Versions share memory with the model that they were captured from, and no step, load or write shows in them."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor, equal

from tests.engine.data import pass_for
from tests.engine.sampling.helpers import ask
from tinsmith.engine.base import AdamParams, LoraSpec
from tinsmith.engine.lora import peft


def tensors(engine: Any, version: str) -> list[Tensor]:
    """What the version samples with."""
    return [tensor for pair in engine.sampler.versions.weights(version).pairs.values() for tensor in (pair.a, pair.b)]


async def train(engine: Any, model_id: str, seed: int) -> None:
    await engine.run([pass_for("cross_entropy", model_id, seed=seed)])
    await engine.step(model_id, AdamParams(learning_rate=0.05))


def written(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_that_happens_to_a_model_shows_in_its_versions(
    engine_of: Any, wait: Any, tmp_path: Path, model_id: str, dtype: str
) -> None:
    engine = engine_of("llama", dtype=dtype)

    async def main() -> None:
        await engine.create(model_id, LoraSpec(rank=4, seed=1))
        await train(engine, model_id, 0)
        await engine.save(model_id, tmp_path / "saved", optimizer=True)
        await engine.capture(model_id, "first")
        await engine.capture(model_id, "twin")
        copies = [tensor.clone() for tensor in tensors(engine, "first")]
        await train(engine, model_id, 1)
        await engine.capture(model_id, "second")
        await train(engine, model_id, 2)
        await engine.load(model_id, tmp_path / "saved", optimizer=True)
        await train(engine, model_id, 1)
        await engine.save(model_id, tmp_path / "again", optimizer=True)
        await engine.drop(model_id)
        for name in ("first", "twin", "second"):
            await engine.persist(name, tmp_path / name)
        assert all(equal(left, right) for left, right in zip(tensors(engine, "first"), copies, strict=True))
        first, second = written(tmp_path / "first"), written(tmp_path / "second")
        assert same(first, written(tmp_path / "saved"))
        assert same(first, written(tmp_path / "twin"))
        assert not same(first, second)
        assert same(second, written(tmp_path / "again"))  # as if it had never been captured
        for name in ("first", "twin", "second"):
            await engine.detach(name)

    wait(main())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_leave_alone_what_a_written_version_is_read_from(
    engine_of: Any, wait: Any, tmp_path: Path, model_id: str, dtype: str
) -> None:
    engine = engine_of("llama", dtype=dtype)

    async def main() -> None:
        await engine.create(model_id, LoraSpec(rank=4, seed=1))
        await train(engine, model_id, 0)
        await engine.capture(model_id, "one")
        copies = [tensor.clone() for tensor in tensors(engine, "one")]
        await train(engine, model_id, 1)
        await engine.persist("one", tmp_path / "one")
        for number in (2, 3):
            await engine.capture(model_id, f"v{number}")
            await train(engine, model_id, number)
            await engine.detach(f"v{number}")
        assert all(equal(left, right) for left, right in zip(tensors(engine, "one"), copies, strict=True))
        await engine.detach("one")

    wait(main())


def test_a_step_without_a_gradient_still_moves_by_its_moments(engine: Any, wait: Any, model_id: str) -> None:
    async def main() -> None:
        await engine.create(model_id, LoraSpec(rank=4, seed=1))
        await train(engine, model_id, 0)
        master = engine.trainer._models[model_id].master.detach()
        before = master.clone()
        metrics = await engine.step(model_id, AdamParams(learning_rate=0.05, grad_clip_norm=1.0))
        assert metrics["grad_norm"] == 0
        assert not equal(before, engine.trainer._models[model_id].master.detach())

    wait(main())


def test_a_capture_copies_nothing(engine: Any, wait: Any, model_id: str) -> None:
    async def main() -> None:
        await engine.create(model_id, LoraSpec(rank=4, seed=1))
        await engine.capture(model_id, "one")
        await engine.capture(model_id, "two")
        pairs = zip(tensors(engine, "one"), tensors(engine, "two"), strict=True)
        assert all(left.data_ptr() == right.data_ptr() for left, right in pairs)
        for name in ("one", "two"):
            await engine.detach(name)

    wait(main())


def test_memory_that_a_written_version_leaves_is_used_again_and_shows_in_no_other(
    engine: Any, wait: Any, tmp_path: Path, model_id: str
) -> None:
    async def main() -> None:
        await engine.create(model_id, LoraSpec(rank=4, seed=1))
        for number in range(6):
            await train(engine, model_id, number)
            await engine.capture(model_id, f"v{number}")
            await engine.save(model_id, tmp_path / f"wanted{number}", optimizer=False)
            if number % 2:  # two versions wait at a time, and the younger one is written first
                await engine.persist(f"v{number}", tmp_path / f"v{number}")
                await train(engine, model_id, 10 + number)
                await engine.persist(f"v{number - 1}", tmp_path / f"v{number - 1}")
        for number in range(6):
            assert same(written(tmp_path / f"v{number}"), written(tmp_path / f"wanted{number}"))
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


def test_sampling_and_training_go_on_while_a_version_is_written(
    engine: Any, wait: Any, tmp_path: Path, model_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, write = threading.Event(), peft.write

    def patient(*args: Any) -> int:
        assert go.wait(30)
        return write(*args)

    monkeypatch.setattr(peft, "write", patient)

    async def main() -> None:
        await engine.create(model_id, LoraSpec(rank=4, seed=1))
        await train(engine, model_id, 0)
        await engine.capture(model_id, "slow")
        wanted = [tensor.clone() for tensor in tensors(engine, "slow")]
        writing = asyncio.create_task(engine.persist("slow", tmp_path / "slow"))
        await asyncio.sleep(0.01)
        assert len((await engine.sample(ask(version="slow"))).sequences[0].tokens) == 16
        await train(engine, model_id, 1)
        assert not writing.done()
        await engine.detach("slow")
        go.set()
        assert await writing > 0
        await engine.attach("slow", tmp_path / "slow")
        assert all(equal(left, right) for left, right in zip(tensors(engine, "slow"), wanted, strict=True))
        await engine.detach("slow")

    wait(main())
