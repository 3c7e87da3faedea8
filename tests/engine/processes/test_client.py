"""RemoteEngine: same results as a local engine, errors, death of the child."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.data import pass_for
from tests.engine.inspection import weights_of
from tests.engine.reference import assert_same
from tests.engine.sampling.helpers import assert_same_samples, sample_request, sampling
from tinsmith.engine.base import AdamParams, Datum, LoraSpec, Pass, PassResult
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.model.precision import set_matmul_precision
from tinsmith.engine.process_end import ProcessEnd
from tinsmith.engine.processes.client import RemoteEngine, start_local
from tinsmith.engine.processes.heartbeat import HeartbeatMonitor
from tinsmith.errors import ConfigError, EngineDied, NotFound, TinsmithError
from tinsmith.processes.messages import LENGTH_PREFIX

pytestmark = pytest.mark.usefixtures("forked_programs")


@pytest.fixture(autouse=True)
def rounding() -> None:
    """Set the matmul precision of float32 engines: a bfloat16 engine of another test may have changed it."""
    set_matmul_precision(torch.float32)


@pytest.fixture(scope="module")
def remote(tiny_llama: Path, wait: Any) -> Iterator[RemoteEngine]:
    engine = wait(start(tiny_llama))
    yield engine
    wait(engine.close())


def start(folder: Path) -> Any:
    return start_local(EngineConfig(source=str(folder), dtype="float32", device="cpu", threads=1))


def test_remote_engine_equals_a_local_one(remote: RemoteEngine, engine: Any, wait: Any, tmp_path: Path):
    outcomes = []
    for target in (remote, engine):
        wait(target.create("far", LoraSpec(rank=4, seed=1)))
        (result,) = wait(target.run([pass_for("ppo", "far")]))
        metrics = wait(target.step("far", AdamParams(learning_rate=1e-3)))
        wait(target.capture("far", "far-version"))
        sampled = wait(target.sample(sample_request(version="far-version", num_samples=3, prompt_logprobs=True)))
        weights = weights_of(target, "far", wait, tmp_path / str(len(outcomes)))
        outcomes.append((result, metrics, sampled, weights))
        wait(target.detach("far-version"))
        wait(target.drop("far"))
    (result, metrics, sampled, weights), (expected, wanted_metrics, wanted_sampled, wanted_weights) = outcomes
    assert isinstance(result, PassResult)
    np.testing.assert_array_equal(np.concatenate(result.logprobs), np.concatenate(expected.logprobs))
    assert metrics == wanted_metrics
    assert_same_samples(sampled, wanted_sampled, atol=0)
    assert_same(weights, wanted_weights, tolerance=0)


def test_remote_card_equals_local_card(remote: RemoteEngine, engine: Any):
    assert replace(remote.card, free_bytes=0) == replace(engine.card, free_bytes=0)


def test_errors_keep_their_types(remote: RemoteEngine, wait: Any):
    with pytest.raises(NotFound, match="nobody"):
        wait(remote.step("nobody", AdamParams()))
    (result,) = wait(remote.run([pass_for("ppo", "nobody")]))
    assert isinstance(result, TinsmithError)


def test_short_request_overtakes_a_long_one(remote: RemoteEngine, wait: Any):
    async def run_both() -> list[str]:
        done: list[str] = []

        async def sample(name: str, tokens: int) -> None:
            await remote.sample(sample_request(max_tokens=tokens, num_samples=4))
            done.append(name)

        await asyncio.gather(sample("long", 220), sample("short", 2))
        return done

    assert wait(run_both()) == ["short", "long"]


def test_large_messages_pass_while_the_engine_computes(remote: RemoteEngine, engine: Any, wait: Any):
    targets = np.random.default_rng(1).integers(3, 500, (64, 4000))
    datum = Datum(tokens=np.arange(3, 67, dtype=np.int32), targets=targets)
    large = Pass(model_id="large", data=(datum,), loss_fn="cross_entropy", forward_only=True)

    async def beside(target: Any) -> list[np.ndarray]:
        await target.create("large", LoraSpec(rank=4, seed=1))
        sampling = asyncio.create_task(target.sample(sample_request(max_tokens=60, num_samples=4)))
        results = [await target.run([large]) for _ in range(3)]
        await sampling
        await target.drop("large")
        return [result.logprobs[0] for (result,) in results]

    for actual, expected in zip(wait(beside(remote)), wait(beside(engine)), strict=True):
        assert actual.nbytes == 64 * 4000 * 4
        np.testing.assert_array_equal(actual, expected)


def test_loading_error_reaches_the_parent(tmp_path: Path, wait: Any):
    with pytest.raises(ConfigError, match="nothing-here"):
        wait(start(tmp_path / "nothing-here"))


def test_death_of_the_child_fails_all_calls(tiny_llama: Path, wait: Any):
    async def kill_engine() -> None:
        engine = await start(tiny_llama)
        waiting = await sampling(engine, sample_request(max_tokens=240, num_samples=64))
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineDied):
            await asyncio.wait_for(waiting, timeout=240)
        await asyncio.wait_for(engine.died.wait(), timeout=240)
        with pytest.raises(EngineDied):
            await engine.sample(sample_request())
        await engine.close()

    wait(kill_engine())


class LostChild:
    """A process whose connection has closed and whose exit status nobody knows yet."""

    pid, code = 0, None

    def __init__(self) -> None:
        self.died = asyncio.Event()

    def kill(self) -> None:
        pass


class Sink:
    """The writing end of a connection."""

    def write(self, data: bytes) -> None:
        pass

    async def drain(self) -> None:
        pass


def test_kill_during_the_wait_for_a_reason_fails_all_calls(wait: Any):
    """Fails without the inner `finally` of `_listen`: a group is killed when one rank of several has just ended."""

    async def kill() -> None:
        reader = asyncio.StreamReader()
        engine = RemoteEngine(None, LostChild(), reader, Sink(), HeartbeatMonitor())  # type: ignore[arg-type]
        call = asyncio.create_task(engine.step("m", AdamParams(learning_rate=1.0)))
        await asyncio.sleep(0)
        reader.feed_eof()
        for _ in range(5):  # the listener now waits for the exit status
            await asyncio.sleep(0)
        assert not engine.died.is_set()
        engine.kill(ProcessEnd("killed by the test", from_outside=True))
        with pytest.raises(EngineDied, match="killed by the test"):
            await asyncio.wait_for(call, 60)
        assert engine.died.is_set()

    wait(kill())


@pytest.mark.parametrize("whose", ["ours", "theirs"])
def test_undecodable_message_ends_the_engine(whose: str, tiny_llama: Path, wait: Any):
    async def kill_engine() -> None:
        engine = await start(tiny_llama)
        waiting = await sampling(engine, sample_request(max_tokens=240, num_samples=64))
        if whose == "ours":
            engine._reader.feed_data(LENGTH_PREFIX.pack(3) + b"???")
        else:
            engine._writer.write(LENGTH_PREFIX.pack(3) + b"???")
        with pytest.raises(EngineDied):
            await asyncio.wait_for(waiting, timeout=240)
        assert engine.died.is_set()
        await engine.close()

    wait(kill_engine())


@pytest.mark.parametrize("patience", [0.2, 20.0])
def test_stuck_child_is_killed_on_close(
    patience: float, wait: Any, monkeypatch: pytest.MonkeyPatch, forked_programs: str
):
    """By `close` itself, or when its caller is cancelled."""
    monkeypatch.setattr("sys.executable", forked_programs)  # SIGSTOP is not passed on to a forked program
    monkeypatch.setattr("tinsmith.engine.processes.client.CLOSE_TIMEOUT_S", patience)
    large = Datum(tokens=np.zeros(64, np.int32), targets=np.zeros((64, 20_000), np.int64))

    async def stuck() -> None:
        engine = await start_local(EngineConfig(source="toy", kind="fake"))
        os.kill(engine.pid, signal.SIGSTOP)
        waiting = asyncio.create_task(engine.run([Pass(model_id="m", data=(large,), loss_fn="cross_entropy")]))
        await asyncio.sleep(0.1)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(engine.close(), 1)
        await asyncio.wait_for(engine._child.died.wait(), 240)
        with pytest.raises(EngineDied):
            await asyncio.wait_for(waiting, 240)

    wait(stuck())
