"""Custom rewards: user code, selected by its import path."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any, ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from tinsmith.plurals import counted
from tinsmith.rl.plugins import (
    KINDS,
    CustomPart,
    Kind,
    await_if_needed,
    check_signature,
    import_object,
    path_text,
    validated,
)
from tinsmith.rl.policy.sampling import Snapshot
from tinsmith.rl.rewards.base import Reward, RewardValue, Score
from tinsmith.rl.scoring.pool import ScoringPool
from tinsmith.rl.types import Rollout, Task


class CustomReward(CustomPart, Reward):
    """User code: a function of (task, rollout), or of (task, rollouts) for the whole group; a class whose instances are
    such functions; or a Reward class."""

    kind: ClassVar[Kind] = "reward"
    type: Literal["custom"] = "custom"
    isolated: float = Field(default=0.0, ge=0)
    """Call the code in a worker process, with this time limit in seconds: it may then hang, crash or use too much
    memory (4 GiB) without harm to the run; its rollout fails. 0: call it in the run's process."""

    @override
    def check_code(self) -> None:
        target = self._target
        if self.isolated and (isinstance(target, Reward) or not isinstance(self.path, str)):
            raise ValueError("isolated needs a function or a class with __call__, named by its import path")
        if self.isolated and self.of_group:
            raise ValueError("isolated is not used with a reward that compares the replies of a group; leave it out")

    @property
    @override
    def of_group(self) -> bool:
        if isinstance(self._target, Reward):
            return self._target.of_group
        return "rollouts" in inspect.signature(self._target).parameters

    @property
    @override
    def title(self) -> str:
        """The name in metrics: `name`, else the attribute of the path."""
        return self.name or path_text(self.path).rpartition(":")[2]

    @cached_property
    def _target(self) -> Any:
        """A Reward, or a function of (task, rollout) or (task, rollouts). Raises ValueError if path or arguments are
        wrong."""
        target, path = import_object(self.path), path_text(self.path)
        if isinstance(target, type) and issubclass(target, Reward):
            return validated(target, path, self.args)
        if isinstance(target, type):
            check_signature(target, path, (), self.args, KINDS["reward"].own_keys)
            return target(**self.args)
        if not callable(target):
            raise ValueError(f"{path} is neither a function nor a class")
        check_signature(target, path, ("task", "rollout"), self.args, KINDS["reward"].own_keys)
        return partial(target, **self.args)

    async def judge_isolated(self, pool: ScoringPool, task: Task, rollout: Rollout) -> Score:
        """The score of a rollout, made in a process of `pool`. Raises TimeoutError or ComparisonError."""
        arguments = (str(self.path), self.args, task, rollout)
        try:
            return Score(**await pool.call("tinsmith.rl.rewards.isolated:score", *arguments, seconds=self.isolated))
        except TimeoutError:
            raise TimeoutError(f"{self.title} took longer than {counted(self.isolated, 'second')}") from None

    @override
    async def judge(self, task: Task, rollout: Rollout, policy: Snapshot) -> RewardValue:
        if isinstance(self._target, Reward):
            return await self._target.judge(task, rollout, policy)
        return await await_if_needed(self._target(task, rollout))

    @override
    async def judge_group(
        self, task: Task, rollouts: Sequence[Rollout], policy: Snapshot, seed: int
    ) -> Sequence[RewardValue]:
        if isinstance(self._target, Reward):
            return await self._target.judge_group(task, rollouts, policy, seed)
        return await await_if_needed(self._target(task, rollouts))
