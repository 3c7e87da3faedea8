"""A workflow of one's own, by its path."""

from __future__ import annotations

import asyncio
import inspect
from functools import cached_property
from typing import Any, Literal

from pydantic import Field, model_validator

from tinsmith.rl.plugins import accepts, made, thing_at
from tinsmith.rl.policy import Snapshot, request_seed
from tinsmith.rl.types import Rollout, Task
from tinsmith.rl.workflows.base import Parts, Workflow, WorkflowOptions, scored
from tinsmith.rl.workflows.talk import Talk


class CustomConfig(WorkflowOptions):
    """Code of your own: an async function of (task, talk), called for each rollout, or a WorkflowOptions class."""

    type: Literal["custom"] = "custom"
    path: str
    """module:attribute, as my_package.flows:debate or, of a file debate.py in `plugins`, debate:flow."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Its settings: keyword arguments of the function, or fields of the class."""

    @model_validator(mode="after")
    def _can_be_used(self) -> CustomConfig:
        _ = self._made
        return self

    @property
    def gives_rewards(self) -> bool:
        """A function may return one."""
        return self._made.gives_rewards if isinstance(self._made, WorkflowOptions) else True

    @property
    def tells_states(self) -> bool:
        """A function may."""
        return self._made.tells_states if isinstance(self._made, WorkflowOptions) else True

    @cached_property
    def _made(self) -> Any:
        """WorkflowOptions, or the function. Raises ValueError."""
        thing = thing_at(self.path)
        if isinstance(thing, type) and issubclass(thing, WorkflowOptions):
            return made(thing, self.path, self.args)
        if not inspect.iscoroutinefunction(thing):
            raise ValueError(f"{self.path} is neither an async function nor a WorkflowOptions class")
        accepts(thing, self.path, 2, self.args)
        return thing

    def make(self, parts: Parts) -> Workflow:
        """The class's own workflow, or one that calls the function."""
        if isinstance(self._made, WorkflowOptions):
            return self._made.make(parts)
        return Written(self._made, self.args, parts)


class Written:
    """Rollouts of a task go side by side, each a call of the function."""

    def __init__(self, function: Any, args: dict[str, Any], parts: Parts) -> None:
        self._function, self._args, self._parts = function, args, parts

    async def run(self, task: Task, policy: Snapshot, *, count: int, seed: int) -> tuple[Rollout, ...]:
        """`count` calls."""
        return tuple(await asyncio.gather(*(self._one(task, policy, request_seed(seed, at)) for at in range(count))))

    async def _one(self, task: Task, policy: Snapshot, seed: int) -> Rollout:
        talk = Talk(policy, self._parts.sampling, seed)
        try:
            own = await self._function(task, talk, **self._args)
        except Exception as error:  # noqa: BLE001  it is the user's code, and one rollout's fault is not the group's
            return Rollout(turns=talk.turns, error=f"{type(error).__name__}: {error}")
        if not talk.turns:
            return Rollout(error="the workflow asked the policy nothing")
        return await scored(task, talk.turns, self._parts.rewards, policy, own)
