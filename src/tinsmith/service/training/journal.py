"""How a model comes back: its last captured state, then the requests since, in order.

A captured state is a folder (weights and moments, as an engine saves them) that holds the effect of every request up to
`Model.covered`; requests after that keep their payloads in the store. States are captured by itself every N optimizer
steps, and whenever a save or a load put one on disk anyway: that costs a hard link. Gradients are in no state, so a
state covers up to the last step or load, never the forward_backward requests after it.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredModel:
    """A model that is back in its engine."""

    updated_seq: int
    """seq_id of the last optim_step or load."""
    uncaptured_steps: int
    """Replayed optimizer steps: they count towards the next capture."""
    unwritten_versions: tuple[Checkpoint, ...]
    """Unnamed versions that the replay made again; the caller writes them to disk."""


class Journal:
    """The captured states of one data folder, and replay from them."""

    def __init__(self, store: Store, root: Path, every: int) -> None:
        self._store = store
        self._root = root
        self.capture_every = every
        """Optimizer steps between captures."""
        root.mkdir(parents=True, exist_ok=True)

    async def link(self, model: Model, source: Path, seq: int) -> str:
        """A folder's files under the journal's own name, so that deleting the original takes nothing away."""
        name = self._name(model, seq)
        await asyncio.to_thread(link_folder, source, self._root / name)
        return name

    def folder(self, name: str) -> Path:
        """Where a state is, or is to be, on disk; absolute."""
        return (self._root / name).resolve()

    async def capture(self, model: Model, seq: int, engine: Engine) -> None:
        """Save the model's state of this moment, which holds everything up to `seq`."""
        name = self._name(model, seq)
        await engine.save(model.id, self.folder(name), optimizer=True)
        await self.adopt(replace(model, captured=name, captured_optimizer=True, covered=seq))

    async def adopt(self, model: Model) -> None:
        """Make `model.captured` what the model comes back from; older states and covered payloads go."""
        await self._store.cover(model)
        keep = self._root / model.captured if model.captured else None
        home = self._home(model.id)
        for folder in list(home.iterdir()) if home.is_dir() else []:
            if folder != keep:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def forget(self, model: Model) -> None:
        """Of a model that has ended nothing is kept."""
        [used] = await self._store.last_used([model])
        await self._store.cover(replace(model, state="ended", captured=None, covered=2**62, used=used))
        await asyncio.to_thread(shutil.rmtree, self._home(model.id), ignore_errors=True)

    async def restore(self, model: Model, engine: Engine) -> RestoredModel:
        """Have the model in the engine as its last finished request left it.

        Raises EngineError if a replayed request fails.
        """
        past = await self._store.requests_to_replay(model)
        if model.captured is not None:
            await engine.load(model.id, self.folder(model.captured), optimizer=model.captured_optimizer)
        else:
            await engine.create(model.id, model.lora)
        if past:
            log.info("Replaying %d requests of model %s.", len(past), model.id)
        updated, steps, versions = model.covered, 0, []
        for _, group in groupby(past, key=lambda one: (one.kind, one.batch or one.seq)):
            rows = list(group)
            if rows[0].kind == "forward_backward":
                await self._replay_passes(model, rows, engine)
            elif rows[0].kind == "step":
                work = decode_operation("step", model.id, rows[0].payload)
                assert isinstance(work, OptimStep)
                await engine.step(model.id, work.adam)
                updated, steps = rows[0].seq, steps + 1
            elif rows[0].kind == "save_sampler":
                versions += await self._replay_version(model, rows[0], engine)
        return RestoredModel(updated_seq=updated, uncaptured_steps=steps, unwritten_versions=tuple(versions))

    async def _replay_passes(self, model: Model, rows: Sequence[ReplayedRequest], engine: Engine) -> None:
        """Packed as they were, so that on a CPU sums are the same to the bit."""
        works = [decode_operation(row.kind, model.id, row.payload) for row in rows]
        for row, result in zip(rows, await engine.run([work for work in works if isinstance(work, Pass)]), strict=True):
            if isinstance(result, EngineDied):
                raise result
            if isinstance(result, TinsmithError):
                raise EngineError(f"Request {row.id} cannot be replayed: {result}")

    async def _replay_version(self, model: Model, row: ReplayedRequest, engine: Engine) -> list[Checkpoint]:
        work = decode_operation(row.kind, model.id, row.payload)
        made = [one for one in self._store.checkpoints_of_run(model.id) if one.made_by == row.id and not one.ready]
        if isinstance(work, SaveSampler):
            for checkpoint in made:
                await engine.capture(model.id, checkpoint.id)
        return made

    async def clean_up(self) -> None:
        """At start: states of models that have ended, and others than the one that their model comes back from.

        What the database does not know stays, and so does all of a model whose state is not there: the database may be
        another one, or an older copy.
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

    def _name(self, model: Model, seq: int) -> str:
        """Never one that is in use: the standing state must stay until the new one counts."""
        return f"{self._home(model.id).name}/{seq}-{uuid.uuid4().hex[:8]}"

    def _home(self, model_id: str) -> Path:
        return self._root / model_id.replace(":", "-")
