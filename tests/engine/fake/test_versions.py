"""Versions and states of the fake engine on disk: the event loop goes on meanwhile, and memory stays bounded."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.fake.test_engine import engine
from tinsmith.engine.base import LoraSpec
from tinsmith.engine.fake import engine as fake_engine
from tinsmith.engine.fake import versions as fake_versions
from tinsmith.engine.fake.engine import FakeEngine
from tinsmith.engine.fake.model import FakeAdapter
from tinsmith.engine.fake.versions import CACHED, FakeVersions
from tinsmith.errors import Gone

LORA = LoraSpec(rank=2, seed=1)


def adapter(seed: int) -> FakeAdapter:
    rng = np.random.default_rng(seed)
    a, b = rng.standard_normal((2, 16)).astype(np.float32), rng.standard_normal((512, 2)).astype(np.float32)
    return FakeAdapter(lora=LORA, a=a, b=b)


def slow(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> threading.Event:
    """Let a function wait for an event, as for a slow disk."""
    gate, function = threading.Event(), getattr(module, name)

    def wait(*args: Any, **options: Any) -> Any:
        assert gate.wait(240), "the event loop waits for the disk"
        return function(*args, **options)

    monkeypatch.setattr(module, name, wait)
    return gate


async def save(fake: FakeEngine, data: Path) -> None:
    await fake.save("m", data / "saved", optimizer=True)


async def load(fake: FakeEngine, data: Path) -> None:
    await fake.load("m", data / "state", optimizer=True)


async def persist(fake: FakeEngine, data: Path) -> None:
    await fake.capture("m", "v")
    await fake.persist("v", data / "v")


@pytest.mark.parametrize(
    ("work", "module", "name"),
    [
        (save, fake_engine, "write_adapter"),
        (load, fake_engine, "_read_model"),
        (persist, fake_versions, "write_adapter"),
    ],
)
def test_event_loop_goes_on_while_files_are_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    work: Callable[[FakeEngine, Path], Awaitable[None]],
    module: Any,
    name: str,
) -> None:
    """Break `save`, `load` or `persist`: call the function without `asyncio.to_thread`."""

    async def main() -> None:
        fake = engine()
        await fake.create("m", LORA)
        await fake.save("m", tmp_path / "state", optimizer=True)
        gate = slow(monkeypatch, module, name)
        asyncio.get_running_loop().call_later(0.01, gate.set)
        await work(fake, tmp_path)

    asyncio.run(main())


def test_few_persisted_versions_stay_in_memory(tmp_path: Path) -> None:
    """Break `persist`: keep the adapter."""

    async def main() -> None:
        versions, originals = FakeVersions(), [adapter(seed) for seed in range(CACHED + 2)]
        for number, original in enumerate(originals):
            versions.capture(str(number), original)
            assert await versions.adapter(str(number)) is original
            await versions.persist(str(number), tmp_path / str(number))
        read = {number: await versions.adapter(str(number)) for number in (*range(len(originals)), 0)}
        for number, original in enumerate(originals):
            assert read[number] is not original
            np.testing.assert_array_equal(read[number].b, original.b)
        assert await versions.adapter("0") is read[0]
        assert await versions.adapter("1") is not read[1]  # CACHED others were used since

    asyncio.run(main())


def test_version_detached_during_its_write_stays_detached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Break `persist`: leave out the comparison after the write."""

    async def main() -> None:
        versions = FakeVersions()
        versions.capture("v", adapter(1))
        gate = slow(monkeypatch, fake_versions, "write_adapter")
        write = asyncio.create_task(versions.persist("v", tmp_path / "v"))
        await asyncio.sleep(0)
        versions.detach("v")
        gate.set()
        await write
        with pytest.raises(Gone):
            await versions.adapter("v")

    asyncio.run(main())
