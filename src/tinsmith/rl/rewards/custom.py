"""A reward of one's own, by its path."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal

from pydantic import Field, model_validator

from tinsmith.rl.plugins import await_if_needed, check_signature, import_object, validated
from tinsmith.rl.policy.base import Snapshot
from tinsmith.rl.rewards.base import Reward, RewardValue
from tinsmith.rl.types import Rollout, Task


class CustomReward(Reward):
    """Code of your own: a function of (task, rollout), a class whose objects are that, or a Reward class."""

    type: Literal["custom"] = "custom"
    path: str
    """module:attribute, as my_package.rewards:short or, of a file short.py in `plugins`, short:score."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Its settings: keyword arguments of the function or class, or fields of the Reward class."""

    @model_validator(mode="after")
    def _can_be_used(self) -> CustomReward:
        _ = self._made
        return self

    @property
    def title(self) -> str:
        """The attribute's name if it has no other."""
        return self.name or self.path.rpartition(":")[2]

    @cached_property
    def _made(self) -> Any:
        """A Reward, or what is called with (task, rollout). Raises ValueError."""
        thing = import_object(self.path)
        if isinstance(thing, type) and issubclass(thing, Reward):
            return validated(thing, self.path, self.args)
        if isinstance(thing, type):
            check_signature(thing, self.path, 0, self.args)
            return thing(**self.args)
        if not callable(thing):
            raise ValueError(f"{self.path} is neither a function nor a class")
        check_signature(thing, self.path, 2, self.args)
        return lambda task, rollout: thing(task, rollout, **self.args)

    async def judge(self, task: Task, rollout: Rollout, policy: Snapshot) -> RewardValue:
        """Whatever the code says."""
        if isinstance(self._made, Reward):
            return await self._made.judge(task, rollout, policy)
        return await await_if_needed(self._made(task, rollout))
