"""An engine in a process of its own answers as one here does, and its death is told to everyone who waits."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.data import pass_for
from tests.engine.inspection import weights_of
from tests.engine.reference import assert_same
from tests.engine.sampling.helpers import ask, assert_same_samples
from tinsmith.engine.autotune import set_matmul_precision
from tinsmith.engine.base import AdamParams, Datum, LoraSpec, Pass, PassResult
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.process import LENGTH_PREFIX, RemoteEngine
from tinsmith.errors import ConfigError, EngineDied, NotFound, TinsmithError


@pytest.fixture(autouse=True)
def rounding() -> None:
    """Of a process whose only engine is a float32 one; another test's bfloat16 engine may have left its own."""
    set_matmul_precision(torch.float32)


@pytest.fixture(scope="module")
def remote(tiny_llama: Path, wait: Any) -> Iterator[RemoteEngine]:
    engine = wait(start(tiny_llama))
    yield engine
    wait(engine.close())


def start(folder: Path) -> Any:
    return RemoteEngine.start(EngineConfig(source=str(folder), dtype="float32", device="cpu", threads=1))


def test_it_trains_and_samples_as_one_here(remote: RemoteEngine, engine: Any, wait: Any, tmp_path: Path):
    found = []
    for one in (remote, engine):
        wait(one.create("far", LoraSpec(rank=4, seed=1)))
        (result,) = wait(one.run([pass_for("ppo", "far")]))
        metrics = wait(one.step("far", AdamParams(learning_rate=1e-3)))
        wait(one.capture("far", "far-version"))
        sampled = wait(one.sample(ask(version="far-version", num_samples=3, prompt_logprobs=True)))
        weights = weights_of(one, "far", wait, tmp_path / str(len(found)))
        found.append((result, metrics, sampled, weights))
        wait(one.detach("far-version"))
        wait(one.drop("far"))
    (result, metrics, sampled, weights), (wanted, wanted_metrics, wanted_sampled, wanted_weights) = found
    assert isinstance(result, PassResult)
    np.testing.assert_array_equal(np.concatenate(result.logprobs), np.concatenate(wanted.logprobs))
    assert metrics == wanted_metrics
    assert_same_samples(sampled, wanted_sampled, atol=0)
    assert_same(weights, wanted_weights, tolerance=0)


def test_what_is_loaded_is_told(remote: RemoteEngine, engine: Any):
    assert remote.card == engine.card


def test_errors_come_over_as_they_are(remote: RemoteEngine, wait: Any):
    with pytest.raises(NotFound, match="nobody"):
        wait(remote.step("nobody", AdamParams()))
    (result,) = wait(remote.run([pass_for("ppo", "nobody")]))
    assert isinstance(result, TinsmithError)


def test_a_long_request_does_not_hold_up_a_short_one(remote: RemoteEngine, wait: Any):
    async def both() -> list[str]:
        done: list[str] = []

        async def one(name: str, tokens: int) -> None:
            await remote.sample(ask(max_tokens=tokens, num_samples=4))
            done.append(name)

        await asyncio.gather(one("long", 220), one("short", 2))
        return done

    assert wait(both()) == ["short", "long"]


def test_messages_of_megabytes_come_and_go_while_the_engine_computes(remote: RemoteEngine, engine: Any, wait: Any):
    targets = np.random.default_rng(1).integers(3, 500, (64, 4000))
    datum = Datum(tokens=np.arange(3, 67, dtype=np.int32), targets=targets)
    large = Pass(model_id="large", data=(datum,), loss_fn="cross_entropy", forward_only=True)

    async def beside(one: Any) -> list[np.ndarray]:
        await one.create("large", LoraSpec(rank=4, seed=1))
        sampling = asyncio.create_task(one.sample(ask(max_tokens=60, num_samples=4)))
        results = [await one.run([large]) for _ in range(3)]
        await sampling
        await one.drop("large")
        return [result.logprobs[0] for (result,) in results]

    for found, wanted in zip(wait(beside(remote)), wait(beside(engine)), strict=True):
        assert found.nbytes == 64 * 4000 * 4
        np.testing.assert_array_equal(found, wanted)


def test_a_model_that_cannot_be_loaded_is_told_with_its_reason(tmp_path: Path, wait: Any):
    with pytest.raises(ConfigError, match="nothing-here"):
        wait(start(tmp_path / "nothing-here"))


def test_a_death_ends_every_wait(tiny_llama: Path, wait: Any):
    async def death() -> None:
        engine = await start(tiny_llama)
        waiting = asyncio.create_task(engine.sample(ask(max_tokens=240, num_samples=64)))
        await asyncio.sleep(0.2)
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineDied):
            await asyncio.wait_for(waiting, timeout=20)
        await asyncio.wait_for(engine.died.wait(), timeout=20)
        with pytest.raises(EngineDied):
            await engine.sample(ask())
        await engine.close()

    wait(death())


@pytest.mark.parametrize("whose", ["ours", "theirs"])
def test_a_message_that_cannot_be_read_is_a_death(whose: str, tiny_llama: Path, wait: Any):
    async def death() -> None:
        engine = await start(tiny_llama)
        waiting = asyncio.create_task(engine.sample(ask(max_tokens=240, num_samples=64)))
        await asyncio.sleep(0.2)
        if whose == "ours":
            engine._reader.feed_data(LENGTH_PREFIX.pack(3) + b"???")
        else:
            engine._writer.write(LENGTH_PREFIX.pack(3) + b"???")
        with pytest.raises(EngineDied):
            await asyncio.wait_for(waiting, timeout=20)
        assert engine.died.is_set()
        await engine.close()

    wait(death())


@pytest.mark.parametrize("patience", [0.2, 20.0])
def test_a_process_that_is_stuck_is_killed(
    patience: float, tiny_llama: Path, wait: Any, monkeypatch: pytest.MonkeyPatch
):
    """By the close itself, or when its caller has waited long enough."""
    monkeypatch.setattr("tinsmith.engine.process.CLOSE_TIMEOUT_S", patience)
    large = Datum(tokens=np.zeros(64, np.int32), targets=np.zeros((64, 20_000), np.int64))

    async def stuck() -> None:
        engine = await start(tiny_llama)
        os.kill(engine.pid, signal.SIGSTOP)
        waiting = asyncio.create_task(engine.run([Pass(model_id="m", data=(large,), loss_fn="cross_entropy")]))
        await asyncio.sleep(0.1)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(engine.close(), 1)
        await asyncio.wait_for(engine._child.wait(), 5)
        with pytest.raises(EngineDied):
            await asyncio.wait_for(waiting, 5)

    wait(stuck())
