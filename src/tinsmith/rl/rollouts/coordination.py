"""Coordination of the side that samples and the side that trains, through notes.

    weights    written by training: weights to sample from, oldest first
    training   written by training: number of batches taken, and the step after which training ended
    sampling   written by sampling: whether it is running, has ended or has failed, and its progress
    wanted     written by sampling: it waits for weights newer than those of this step; training clears it

The protocol has two transports. In one process the notes are in memory and every change wakes those who wait for one.
Several processes keep the notes in the buffer that all open, and poll them; each may be killed and restarted. Of
several that sample, each has a name and notes of its own, such as sampling-b.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Literal, Protocol

from pydantic import TypeAdapter

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
    """This batch and all earlier ones have been put into the buffer, by whichever process."""


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

    def __init__(self, store: NoteStore, sampler: str = "") -> None:
        """`sampler`: name of this process, of several that sample."""
        self._store, self._suffix = store, f"-{sampler}" if sampler else ""
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
        """Status of sampling: of several processes, failed if one has failed, and ended if all have ended."""
        texts = await self._named("sampling")
        statuses = {name: SamplerStatus.model_validate_json(text) for name, text in texts.items()}
        done = max((status.done for status in statuses.values()), default=0)
        for name, status in statuses.items():
            if status.state == "failed":
                reason = f"{name.removeprefix('sampling-')}: {status.reason}" if len(statuses) > 1 else status.reason
                return SamplerStatus(state="failed", reason=reason, done=done)
        ended = bool(statuses) and all(status.state == "ended" for status in statuses.values())
        return SamplerStatus(state="ended" if ended else "under way", done=done)

    async def weights_wanted(self) -> bool:
        """Whether a process that samples waits for newer weights."""
        return any((await self._named("wanted")).values())

    async def wants_weights(self) -> bool:
        """Whether the request of this process for newer weights is not answered yet."""
        return bool((await self._store.notes()).get(f"wanted{self._suffix}"))

    async def write_weights(self, weights: tuple[WeightRecord, ...]) -> None:
        """Publish weights, which also answers all requests for newer ones."""
        wanted = await self._named("wanted")
        self.last_weights = weights
        await self._store.note("weights", _WEIGHTS.dump_json(weights).decode())
        await self._answer(wanted)

    async def write_training(self, status: TrainerStatus) -> None:
        """Replace the status of training."""
        await self._write("training", status.model_dump_json())

    async def write_sampling(self, status: SamplerStatus) -> None:
        """Replace the status of sampling by this process."""
        await self._write(f"sampling{self._suffix}", status.model_dump_json())

    async def want_weights(self, step: int) -> None:
        """Request weights newer than those of `step`."""
        await self._write(f"wanted{self._suffix}", str(step))

    async def decline_weights(self) -> None:
        """Answer all requests for newer weights: there are none."""
        await self._answer(await self._named("wanted"))

    async def _answer(self, wanted: Mapping[str, str]) -> None:
        for name in (name for name, step in wanted.items() if step):
            await self._store.note(name, "")
        self.changes.notify()

    async def _named(self, kind: str) -> Mapping[str, str]:
        """Notes of this kind of all processes that sample."""
        notes = await self._store.notes()
        return {name: text for name, text in notes.items() if name == kind or name.startswith(f"{kind}-")}

    async def _write(self, name: str, text: str) -> None:
        await self._store.note(name, text)
        self.changes.notify()
