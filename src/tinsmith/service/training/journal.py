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
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from tinsmith.atomic import link_folder
from tinsmith.engine.base import Engine, Pass
from tinsmith.errors import EngineDied, EngineError, TinsmithError
from tinsmith.service.checkpoints import complete_folders, warn_of_unknown_folders
from tinsmith.service.storage.payloads import decode_operation
from tinsmith.service.storage.records import Checkpoint, Model, OptimStep, ReplayedRequest, SaveSampler
from tinsmith.service.storage.store import Store

log = logging.getLogger(__name__)

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

    def __init__(self, store: Store, root: Path, capture_every: int) -> None:
        self._store = store
        self._root = root
        self.capture_every = capture_every
        """Optimizer steps between captures."""
        root.mkdir(parents=True, exist_ok=True)

    def folder(self, name: str) -> Path:
        """Absolute path of a state's folder, which may not exist yet."""
        return (self._root / name).resolve()

    # Capturing.

    async def link(self, model: Model, source: Path, seq: int) -> str:
        """Hard-link a folder's files as a state, so that the source can be deleted. Returns the state's name."""
        name = self._new_name(model, seq)
        await asyncio.to_thread(link_folder, source, self._root / name)
        return name

    async def capture(self, model: Model, seq: int, engine: Engine) -> None:
        """Save the model's current state, which covers the requests up to `seq`, and adopt it."""
        name = self._new_name(model, seq)
        await engine.save(model.id, self.folder(name), optimizer=True)
        await self.adopt(replace(model, captured=name, captured_optimizer=True, covered=seq))

    async def adopt(self, model: Model) -> None:
        """Restore the model from `model.captured` from now on. Older states and covered payloads are deleted."""
        await self._store.cover(model)
        captured = self._root / model.captured if model.captured else None
        home = self._home(model.id)
        for folder in list(home.iterdir()) if home.is_dir() else []:
            if folder != captured:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def forget(self, model: Model) -> None:
        """Mark a model as ended and delete its states and payloads."""
        [used] = await self._store.last_used([model])
        await self._store.cover(replace(model, state="ended", captured=None, covered=ALL_SEQS, used=used))
        await asyncio.to_thread(shutil.rmtree, self._home(model.id), ignore_errors=True)

    # Replaying.

    async def restore(self, model: Model, engine: Engine) -> RestoredModel:
        """Bring the model into the engine as its last finished request left it.

        Raises EngineError if a replayed request fails.
        """
        requests = await self._store.requests_to_replay(model)
        if model.captured is not None:
            await engine.load(model.id, self.folder(model.captured), optimizer=model.captured_optimizer)
        else:
            await engine.create(model.id, model.lora)
        if requests:
            log.info("Replaying %d requests of model %s.", len(requests), model.id)
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
        results = await engine.run([operation for operation in operations if isinstance(operation, Pass)])
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
        unknown = []
        for home in await complete_folders(self._root):
            model, states = models.get(home), await complete_folders(home)
            if model is not None and model.state == "ended":
                await asyncio.to_thread(shutil.rmtree, home, ignore_errors=True)
            elif model is not None and model.captured is not None and (self._root / model.captured) in states:
                for old in (state for state in states if state != self._root / model.captured):
                    await asyncio.to_thread(shutil.rmtree, old, ignore_errors=True)
            elif states:
                unknown.append(home)
        warn_of_unknown_folders(self._root, unknown)

    def _new_name(self, model: Model, seq: int) -> str:
        """A name that is not in use: the current state must stay until the new one is adopted."""
        return f"{self._home(model.id).name}/{seq}-{uuid.uuid4().hex[:8]}"

    def _home(self, model_id: str) -> Path:
        return self._root / model_id.replace(":", "-")
