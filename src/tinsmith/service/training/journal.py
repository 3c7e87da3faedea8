"""Journal: how a model is restored after a crash, from its last captured state and the requests since, in order.

A captured state is a folder (weights and optimizer moments, as an engine saves them) with the effect of every request
up to `Model.covered`; later requests keep their payloads in the store. A state is captured every `capture_every`
optimizer steps, and whenever a save or a load puts one on disk anyway, at the cost of hard links. No state holds
gradients, so a state covers requests up to the last step or load, never the forward_backward requests after it.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from tinsmith.engine.base import Pass, SavedAdapter
from tinsmith.engine.interface import Engine
from tinsmith.errors import EngineDied, EngineError, TinsmithError
from tinsmith.plurals import counted
from tinsmith.service.budgets.disk import DiskMonitor
from tinsmith.service.budgets.orphans import UnrecordedFolders
from tinsmith.service.checkpoints import Checkpoints, complete_folders, warn_of_unknown_folders
from tinsmith.service.storage.object_copies import ObjectCopies
from tinsmith.service.storage.payloads import decode_operation
from tinsmith.service.storage.records import Checkpoint, Model, OptimStep, ReplayedRequest, SaveSampler
from tinsmith.service.storage.store import Store

log = logging.getLogger(__name__)

MEASURE_S = 60.0
"""Time between two measurements of the size of all states."""
ALL_SEQS = 2**62
"""Larger than any seq_id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredModel:
    """What a replay did."""

    updated_seq: int
    """seq_id of the last optim_step or load."""
    uncaptured_steps: int
    """Replayed optimizer steps: they count towards the next capture."""
    unwritten_versions: tuple[Checkpoint, ...]
    """Unnamed versions that the replay made again; the caller writes them to disk."""


class Journal:
    """The captured states of a data folder, and replay from them."""

    def __init__(
        self,
        store: Store,
        root: Path,
        capture_every: int,
        disk: DiskMonitor | None = None,
        copies: ObjectCopies | None = None,
    ) -> None:
        self._store, self._disk = store, disk
        self._copies = copies or ObjectCopies(store)
        self._root = root
        self.capture_every = capture_every
        """Optimizer steps between captures."""
        self.size_bytes = 0
        """Size of all states, measured by `run`."""
        root.mkdir(parents=True, exist_ok=True)
        self._unrecorded = UnrecordedFolders(root, store.name)

    @property
    def has_room(self) -> bool:
        """Whether there is room for states that are not on the disk anyway: a replay can do without them."""
        return (self._disk is None or not self._disk.is_low) and self._copies.is_available

    def folder(self, name: str) -> Path:
        """Absolute path of a state's folder, which may not exist yet."""
        return (self._root / name).resolve()

    async def run(self) -> None:
        """Forever: measure the states, those that share their files with a checkpoint included."""
        while True:
            with suppress(FileNotFoundError):  # replaced meanwhile
                self.size_bytes = await asyncio.to_thread(_total_size, self._root)
            await asyncio.sleep(MEASURE_S)

    # Capturing.

    async def link(self, model: Model, checkpoints: Checkpoints, checkpoint: Checkpoint, seq: int) -> Model:
        """Give a checkpoint's files another name, as a state, so that the checkpoint can be deleted.

        Returns the model with this state, which covers the requests up to `seq`.
        """
        name = self._new_name(model, seq)
        with self._unrecorded.noted(name):
            digest = await checkpoints.link(checkpoint, self._root / name)
        return replace(model, captured=name, captured_optimizer=True, captured_digest=digest, covered=seq)

    async def source(self, model: Model) -> SavedAdapter:
        """What an engine reads a model's captured state from."""
        return await self._copies.source(self.folder(str(model.captured)), model.captured_digest)

    async def discard(self, name: str) -> None:
        """Delete a state that was not adopted."""
        self._copies.forget(self.folder(name))
        await asyncio.to_thread(shutil.rmtree, self._root / name, ignore_errors=True)
        self._unrecorded.recorded(name)

    async def capture(self, model: Model, seq: int, engine: Engine) -> None:
        """Save the model's current state, which covers the requests up to `seq`, and adopt it."""
        name = self._new_name(model, seq)
        with self._unrecorded.noted(name):
            await engine.save(model.id, self.folder(name), optimizer=True)
        try:
            digest = await self._copies.publish(self.folder(name), waits=False)
        except (TinsmithError, OSError):
            await self.discard(name)
            raise
        await self.adopt(replace(model, captured=name, captured_optimizer=True, captured_digest=digest, covered=seq))

    async def adopt(self, model: Model) -> None:
        """Restore the model from `model.captured` from now on. Older states and covered payloads are deleted."""
        try:
            await self._store.cover(model)
        finally:  # after a cancellation the database may have the state
            if model.captured is not None:
                self._unrecorded.recorded(model.captured)
        captured = self._root / model.captured if model.captured else None
        home = self._home(model.id)
        for folder in list(home.iterdir()) if home.is_dir() else []:
            if folder != captured:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def forget(self, model: Model) -> None:
        """Delete a model's states and mark it as ended: files first, since the disk may have no room for the row."""
        await asyncio.to_thread(shutil.rmtree, self._home(model.id), ignore_errors=True)
        [used] = await self._store.last_used([model])
        await self._store.cover(replace(model, state="ended", captured=None, covered=ALL_SEQS, used=used))

    # Replaying.

    async def restore(self, model: Model, engine: Engine) -> RestoredModel:
        """Bring the model into the engine as its last finished request left it.

        Raises EngineError if a replayed request fails.
        """
        requests = await self._store.requests_to_replay(model)
        if model.captured is not None:
            await engine.load(model.id, await self.source(model), optimizer=model.captured_optimizer)
        else:
            await engine.create(model.id, model.lora)
        if requests:
            log.info("Replaying %s of model %s.", counted(len(requests), "request"), model.id)
        updated_seq, steps, versions = model.covered, 0, []
        for _, group in groupby(requests, key=lambda request: (request.kind, request.batch or request.seq)):
            batch = list(group)
            first = batch[0]
            if first.kind == "forward_backward":
                await self._replay_passes(model, batch, engine)
            elif first.kind == "step":
                operation = decode_operation("step", model.id, first.payload)
                assert isinstance(operation, OptimStep)
                await engine.step(model.id, operation.adam)
                updated_seq, steps = first.seq, steps + 1
            elif first.kind == "save_sampler":
                versions += await self._replay_capture(model, first, engine)
        return RestoredModel(updated_seq=updated_seq, uncaptured_steps=steps, unwritten_versions=tuple(versions))

    async def _replay_passes(self, model: Model, batch: Sequence[ReplayedRequest], engine: Engine) -> None:
        """Run passes in the batch in which they ran first, so that sums are bit-identical on a CPU."""
        operations = [decode_operation(request.kind, model.id, request.payload) for request in batch]
        passes = [replace(operation, share=model.owner) for operation in operations if isinstance(operation, Pass)]
        results = await engine.run(passes)
        for request, result in zip(batch, results, strict=True):
            if isinstance(result, EngineDied):
                raise result
            if isinstance(result, TinsmithError):
                raise EngineError(f"Request {request.id} cannot be replayed: {result}")

    async def _replay_capture(self, model: Model, request: ReplayedRequest, engine: Engine) -> list[Checkpoint]:
        """Capture the versions of a save_weights_for_sampler request that are not on disk."""
        operation = decode_operation(request.kind, model.id, request.payload)
        versions = [
            version
            for version in self._store.checkpoints_of_run(model.id)
            if version.made_by == request.id and not version.ready
        ]
        if isinstance(operation, SaveSampler):
            for version in versions:
                await engine.capture(model.id, version.id)
        return versions

    # Folders.

    async def clean_up(self) -> None:
        """At start: delete the states of ended models, and all states of a model but its captured one.

        Folders of models that the database does not know stay, and so do all states of a model whose captured state is
        missing: the database may be a different one, or an older copy.
        """
        models = {self._home(model.id): model for model in self._store.all(Model)}
        captured = {model.captured for model in models.values()}
        await asyncio.to_thread(self._unrecorded.delete_orphans, captured.__contains__)
        unknown = []
        for home in await complete_folders(self._root):
            model, states = models.get(home), await complete_folders(home)
            if model is not None and model.state == "ended":
                await asyncio.to_thread(shutil.rmtree, home, ignore_errors=True)
            elif model is not None and self._has_captured(model, states):
                for old in (state for state in states if state != self._root / str(model.captured)):
                    await asyncio.to_thread(shutil.rmtree, old, ignore_errors=True)
            elif states:
                unknown.append(home)
        warn_of_unknown_folders(self._root, unknown)

    def _has_captured(self, model: Model, states: Sequence[Path]) -> bool:
        """Whether the model's captured state is among the folders, or in the object store."""
        return model.captured_digest is not None or (
            model.captured is not None and self._root / model.captured in states
        )

    def _new_name(self, model: Model, seq: int) -> str:
        """A name that is not in use: the current state must stay until the new one is adopted."""
        return f"{self._home(model.id).name}/{seq}-{uuid.uuid4().hex[:8]}"

    def _home(self, model_id: str) -> Path:
        return self._root / model_id.replace(":", "-")


def _total_size(root: Path) -> int:
    return sum(file.stat().st_size for file in root.glob("*/*/*") if file.is_file())
