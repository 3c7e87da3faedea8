"""Checkpoints of a run: its weights on the server, and in its folder the state of everything else.

The weights of a checkpoint are saved at once, and training goes on. Its state holds the batches that were being sampled
at that moment, so that a resumed run has the same ones; it is written at the first step that finds them complete, at
most `staleness` steps later. A run that is killed before resumes from the checkpoint before it. When a run ends, all
states are written; batches that are not complete are stored as far as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tinsmith.rl.config import RunConfig
from tinsmith.rl.ending.until import EndCondition
from tinsmith.rl.rollouts.queue import BatchQueue, QueuePosition
from tinsmith.rl.run.best import BestSoFar
from tinsmith.rl.run.folder import RunFolder
from tinsmith.rl.run.learner import Learner
from tinsmith.rl.run.state import BestCheckpoint, RandomStates, State, as_metadata, json_values

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The end of a step, as far as later steps change it: what was learned and drawn, and which batches were sampled.

    Example: ResumePoint({"step": 3, "version": 3, "cursor": 40, …}, QueuePosition(started=5))
    """

    values: Mapping[str, Any]
    """Fields of a State."""
    position: QueuePosition


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointer:
    """Saves the checkpoints of a run, and writes their states when their batches are complete."""

    config: RunConfig
    folder: RunFolder
    batches: BatchQueue
    learner: Learner
    ending: EndCondition
    best: BestSoFar
    """Which evaluation is the best; the next checkpoint saves its weights."""
    store: Mapping[str, Any]
    """Values that workflows keep from rollout to rollout."""
    _waiting: list[tuple[State, QueuePosition]] = field(default_factory=list, init=False)
    """States that are not written yet, oldest first."""

    def resume_point(self, step: int) -> ResumePoint:
        """Where a run resumes from after `step`; tasks that are drawn from now on are not part of it."""
        return ResumePoint({"step": step, **self.learner.state()}, self.batches.position())

    def due(self, step: int) -> bool:
        """Whether to save a checkpoint after `step`, apart from the last one."""
        every = self.config.checkpoint.every
        return self.best.unsaved is not None or (every > 0 and step % every == 0)

    async def save(self, point: ResumePoint, *, last: bool = False, evaluation_due: bool = False) -> None:
        """Save the weights, and the state at `point` as soon as its batches are complete."""
        name = "final" if last else f"step-{point.values['step']:06}"
        ttl = None if last or self.best.unsaved is not None else self.config.checkpoint.ttl_seconds
        before, critic, policy = self.folder.state, self.learner.critic, self.learner.policy
        state = State(
            **point.values,
            path="",
            random=RandomStates.capture(),
            store=json_values(self.store),
            ending=self.ending.state,
            evaluation_due=evaluation_due,
            critic_path=await critic.save(f"critic-{name}", ttl) if critic else "",
            origin=before.origin if before else "",
        )
        stored = state.model_copy(update={"batches": await self.batches.state_at(point.position)})
        path = await policy.save(name, ttl, as_metadata(stored, self.config.seed))
        sampling_path = await policy.save_for_sampling(name) if last and self.best.saved is None else ""
        if (value := self.best.unsaved) is not None:
            weights = sampling_path or await policy.save_for_sampling(name if last else f"best-{state.step:06}")
            self.best.save(BestCheckpoint(step=state.step, value=value, path=path, sampling_path=weights))
        best = self.best.saved
        if last and best is None and self.config.checkpoint.keep == "best":
            log.warning("checkpoint.metric: %s was never a number; the last weights are the result", self.best.metric)
        saved = {"path": path, "best": best, "sampling_path": best.sampling_path if best and last else sampling_path}
        self._waiting.append((state.model_copy(update=saved), point.position))
        await (self.write_all() if last else self.write_complete())

    async def save_at_stop(self, step: int, *, evaluation_due: bool) -> None:
        """Write all states, and save a checkpoint after `step` unless there is one."""
        await self.write_all()
        saved = self.folder.state
        if saved is None or (saved.step, saved.evaluation_due) != (step, evaluation_due):
            await self.save(self.resume_point(step), evaluation_due=evaluation_due)
            await self.write_all()

    async def write_complete(self) -> None:
        """Write the states whose batches are complete."""
        while self._waiting and self.batches.complete_up_to(self._waiting[0][1]):
            await self._write(*self._waiting.pop(0))

    async def write_all(self) -> None:
        """Write all states now."""
        while self._waiting:
            await self._write(*self._waiting.pop(0))

    async def _write(self, state: State, position: QueuePosition) -> None:
        before = self.folder.state
        new = (state.path, state.critic_path) if state.critic_path else (state.path,)
        others = (paths for paths in (before.checkpoints if before else ()) if paths[0] != state.path)
        dropped, checkpoints = self.config.checkpoint.cut((*others, new), state.best.path if state.best else "")
        batches = await self.batches.state_at(position)
        self.folder.save(state.model_copy(update={"batches": batches, "checkpoints": checkpoints}))
        self.folder.forget(dropped)
        for paths in dropped:
            for deleted in paths:
                await self.learner.policy.models.delete_checkpoint(deleted)
        if before and before.best and before.best != state.best:
            await self.learner.policy.models.delete_checkpoint(before.best.sampling_path)
        await self.batches.state_saved(position)
