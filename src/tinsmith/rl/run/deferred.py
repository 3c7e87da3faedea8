"""States of checkpoints that are written when the batches sampled ahead are complete.

The weights of a checkpoint are saved at once, and training goes on. Its state holds the batches that were being sampled
at that moment, so that a resumed run has the same ones; it is written at the first step that finds them complete, at
most `staleness` steps later. A run that is killed before resumes from the checkpoint before it. When a run ends, all
states are written; batches that are not complete are stored as far as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tinsmith.rl.config.checkpoints import CheckpointConfig
from tinsmith.rl.policy.base import Policy
from tinsmith.rl.rollouts.batch_source import BatchPosition, BatchSource
from tinsmith.rl.run.folder import RunFolder
from tinsmith.rl.run.state import State


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """A state without its batches, which are those at `position`.

    Example: ResumePoint(State(step=3, …), BatchPosition(taken=3, started=5))
    """

    state: State
    position: BatchPosition

    def with_values(self, values: Mapping[str, Any]) -> ResumePoint:
        """The same with other values of the state."""
        return ResumePoint(self.state.model_copy(update=values), self.position)


class DeferredStates:
    """States that are not written yet, oldest first."""

    def __init__(self, folder: RunFolder, policy: Policy, batches: BatchSource, config: CheckpointConfig) -> None:
        self._folder, self._policy, self._batches, self._config = folder, policy, batches, config
        self._waiting: list[ResumePoint] = []

    def add(self, point: ResumePoint) -> None:
        """Add a checkpoint whose weights are saved."""
        self._waiting.append(point)

    async def write_complete(self) -> None:
        """Write the states whose batches are complete."""
        while self._waiting and self._batches.complete_up_to(self._waiting[0].position):
            await self._write(self._waiting.pop(0))

    async def write_all(self) -> None:
        """Write all states now."""
        while self._waiting:
            await self._write(self._waiting.pop(0))

    async def _write(self, point: ResumePoint) -> None:
        state, position = point.state, point.position
        before = self._folder.state
        new = (state.path, state.critic_path) if state.critic_path else (state.path,)
        others = (paths for paths in (before.checkpoints if before else ()) if paths[0] != state.path)
        dropped, checkpoints = self._config.cut((*others, new))
        batches = await self._batches.state_at(position)
        self._folder.save(state.model_copy(update={"batches": batches, "checkpoints": checkpoints}))
        self._folder.forget(dropped)
        for paths in dropped:
            for deleted in paths:
                await self._policy.delete_checkpoint(deleted)
        await self._batches.state_saved(position)
