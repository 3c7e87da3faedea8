"""Coordination of the side that samples and the side that trains, through notes.

    weights    written by training: weights to sample from, oldest first
    training   written by training: number of batches taken, and the step after which training ended
    sampling   written by sampling: whether it is running, has ended or has failed, and its progress
    wanted     written by sampling: it waits for weights newer than those of this step; training clears it

The protocol has two transports. In one process the notes are in memory and every change wakes those who wait for one.
Two processes keep the notes in the buffer that both open, and poll them; either process may be killed and restarted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Literal, Protocol

from pydantic import Field, TypeAdapter

from tinsmith.settings import Settings

POLL_SECONDS = 0.2
"""Longest time between two looks at the notes."""


class WeightRecord(Settings):
    """Published weights."""

    step: int
    """Step after which the weights were published."""
    version: int
    path: str
    """Sampler checkpoint; empty for weights that are held in memory."""


class TrainerStatus(Settings):
    """Progress of the training side."""

    taken: int = 0
    """Batches taken from the buffer."""
    ended_at: int = 0
    """Last step of a finished run; 0 while training is running."""


class SamplerStatus(Settings):
    """Progress of the sampling side."""

    state: Literal["under way", "ended", "failed"] = "under way"
    reason: str = ""
    """Error message of a failure."""
    done: int = 0
    """Number of the last batch in the buffer."""
    cursor: int = 0
    """Training tasks drawn for that batch and all earlier ones."""
    order: dict[str, Any] = Field(default_factory=dict)
    """State of the task order."""


_WEIGHTS = TypeAdapter(tuple[WeightRecord, ...])


class NoteStore(Protocol):
    """Texts by name. Every buffer is one."""

    async def note(self, name: str, text: str) -> None:
        """Write a note; replaces a note of the same name."""
        ...

    async def notes(self) -> Mapping[str, str]:
        """All notes."""
        ...


class ChangeNotifier:
    """Wakes coroutines of this process that wait for a change. `count` is the number of changes so far."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.count = 0

    def notify(self) -> None:
        """Wake everyone who waits."""
        self.count += 1
        self._event.set()
        self._event = asyncio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds; it is checked after every change."""
        while not condition():
            await self._event.wait()

    async def wait(self, seen: int, seconds: float) -> None:
        """Wait until there are more changes than the `seen` ones, at most `seconds`."""
        if self.count == seen:
            with suppress(TimeoutError):  # asyncio.wait_for of Python 3.11 may swallow a cancellation
                async with asyncio.timeout(seconds):
                    await self._event.wait()


class CoordinationNotes:
    """Typed notes. `changes` is notified of every note written by this process."""

    def __init__(self, store: NoteStore) -> None:
        self._store = store
        self.changes = ChangeNotifier()
        self.last_weights: tuple[WeightRecord, ...] = ()
        """Weights that were read or written last."""

    async def wait(self, seen: int) -> None:
        """Wait for a change after the `seen` ones, but at most the polling interval."""
        await self.changes.wait(seen, POLL_SECONDS)

    async def weights(self) -> tuple[WeightRecord, ...]:
        """Published weights, oldest first."""
        text = (await self._store.notes()).get("weights")
        self.last_weights = _WEIGHTS.validate_json(text) if text else ()
        return self.last_weights

    async def training(self) -> TrainerStatus:
        """Status that training wrote last."""
        text = (await self._store.notes()).get("training")
        return TrainerStatus.model_validate_json(text) if text else TrainerStatus()

    async def sampling(self) -> SamplerStatus:
        """Status that sampling wrote last."""
        text = (await self._store.notes()).get("sampling")
        return SamplerStatus.model_validate_json(text) if text else SamplerStatus()

    async def weights_wanted(self) -> bool:
        """Whether sampling waits for newer weights."""
        return bool((await self._store.notes()).get("wanted"))

    async def write_weights(self, weights: tuple[WeightRecord, ...]) -> None:
        """Publish weights, which also answers a request for newer ones."""
        self.last_weights = weights
        await self._store.note("weights", _WEIGHTS.dump_json(weights).decode())
        await self._write("wanted", "")

    async def write_training(self, status: TrainerStatus) -> None:
        """Replace the status of training."""
        await self._write("training", status.model_dump_json())

    async def write_sampling(self, status: SamplerStatus) -> None:
        """Replace the status of sampling."""
        await self._write("sampling", status.model_dump_json())

    async def want_weights(self, step: int) -> None:
        """Request weights newer than those of `step`."""
        await self._write("wanted", str(step))

    async def decline_weights(self) -> None:
        """Answer a request for newer weights: there are none."""
        await self._write("wanted", "")

    async def _write(self, name: str, text: str) -> None:
        await self._store.note(name, text)
        self.changes.notify()
