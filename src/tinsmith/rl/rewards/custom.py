"""Custom rewards: user code, selected by its import path."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal

from pydantic import Field, model_validator
from typing_extensions import override

from tinsmith.rl.plugins import (
    Arguments,
    ImportPath,
    await_if_needed,
    check_signature,
    import_object,
    path_text,
    validated,
)
from tinsmith.rl.policy.base import Snapshot
from tinsmith.rl.rewards.base import Reward, RewardValue
from tinsmith.rl.types import Rollout, Task


class CustomReward(Reward):
    """User code: a function of (task, rollout), a class whose instances are such functions, or a Reward class."""

    type: Literal["custom"] = "custom"
    path: ImportPath
    """Import path, module:attribute: `my_package.rewards:short`, or `short:score` for short.py in `plugins`. From
    Python, also the object itself."""
    args: Arguments = Field(default_factory=dict)
    """Keyword arguments of the function or class, or fields of the Reward class."""

    @model_validator(mode="after")
    def _check_path(self) -> CustomReward:
        _ = self._target
        return self

    @property
    @override
    def title(self) -> str:
        """The name in metrics: `name`, else the attribute of the path."""
        return self.name or path_text(self.path).rpartition(":")[2]

    @cached_property
    def _target(self) -> Any:
        """A Reward, or a function of (task, rollout). Raises ValueError if the path or the arguments are wrong."""
        target, path = import_object(self.path), path_text(self.path)
        if isinstance(target, type) and issubclass(target, Reward):
            return validated(target, path, self.args)
        if isinstance(target, type):
            check_signature(target, path, 0, self.args)
            return target(**self.args)
        if not callable(target):
            raise ValueError(f"{path} is neither a function nor a class")
        check_signature(target, path, 2, self.args)
        return lambda task, rollout: target(task, rollout, **self.args)

    @override
    async def judge(self, task: Task, rollout: Rollout, policy: Snapshot) -> RewardValue:
        if isinstance(self._target, Reward):
            return await self._target.judge(task, rollout, policy)
        return await await_if_needed(self._target(task, rollout))
