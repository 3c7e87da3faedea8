"""The environment `verifiers`: environments of the package verifiers, API verifiers.v1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field
from typing_extensions import override

from tinsmith.errors import ConfigError
from tinsmith.integrations.verifiers import environment
from tinsmith.integrations.verifiers.checks import check_task
from tinsmith.integrations.verifiers.package import importable_name, last_part, require_verifiers
from tinsmith.rl.data.ordering import OrderConfig, Sequential, Shuffle
from tinsmith.rl.environments.base import EnvironmentOptions
from tinsmith.rl.types import Rollout, Task
from tinsmith.rl.workflows.base import WorkflowPolicy

if TYPE_CHECKING:
    import verifiers.v1 as vf


class VerifiersEnvironment(EnvironmentOptions):
    """An environment of the package verifiers, API verifiers.v1: its tasks, agents, tools and rewards."""

    type: Literal["verifiers"] = "verifiers"
    id: str
    """Taskset: the name of an importable package, or the path of a package folder or .py file."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Options of the taskset."""
    env: dict[str, Any] = Field(default_factory=dict)
    """Options of the environment and its roles, as in verifiers' [env] without the taskset: {id: best-of-n, n: 4},
    {agent: {max_turns: 3}}."""
    harness: str = environment.DIRECT
    """Program of the roles that name none. `direct`: a chat with the task's tools, in this process. Any other name is a
    harness of verifiers, such as "null" or bash."""
    select: dict[str, Any] = Field(default_factory=dict)
    """Selection of the tasks by verifiers: include, exclude, shuffle, seed, skip, limit."""
    size: int = Field(default=10_000, ge=1)
    """Number of training tasks of an infinite taskset, after its held-out ones; each is made when it is drawn."""
    eval_args: dict[str, Any] | None = None
    """Options of the taskset, on top of `args`, for its held-out tasks, such as {split: test}. Without `eval_args` and
    `eval_select`, some of the tasks are held out: of an infinite taskset the first ones."""
    eval_select: dict[str, Any] | None = None
    """Selection of the held-out tasks; empty: all."""

    @property
    @override
    def title(self) -> str:
        return self.name or last_part(self.id)

    @override
    def tasks(self) -> Sequence[Task]:
        taskset = self._taskset(self._environment, self.select)
        held_out = 0 if taskset.bounded or self._splits else self.most_held_out
        return self._rows(taskset.skip(held_out), self.size)

    @override
    def held_out_tasks(self) -> Sequence[Task] | None:
        if self._splits:
            return self._rows(
                self._taskset(self._load(self.eval_args or {}), self.eval_select or {}), self.most_held_out
            )
        return self._rows(self._taskset(self._environment, self.select), self.most_held_out) if self._infinite else None

    @override
    def task_order(self) -> OrderConfig:
        return Sequential() if self._infinite else Shuffle()

    @override
    async def rollout(self, task: Task, policy: WorkflowPolicy, seed: int) -> Rollout:
        from tinsmith.integrations.verifiers.workflow import episode

        return await episode(self._environment, task, policy, seed)

    @property
    def _splits(self) -> bool:
        """Whether held-out tasks have options of their own."""
        return self.eval_args is not None or self.eval_select is not None

    @property
    def _infinite(self) -> bool:
        return not self._taskset(self._environment, self.select).bounded

    @cached_property
    def _environment(self) -> vf.Env:
        return self._load({})

    def _load(self, args: Mapping[str, Any]) -> vf.Env:
        require_verifiers()
        return environment.load(importable_name(self.id), {**self.args, **args}, self.env, self.harness)

    def _taskset(self, environment: vf.Env, select: Mapping[str, Any]) -> vf.Taskset:
        from verifiers.v1 import SelectConfig

        try:
            return environment.taskset.select(SelectConfig.model_validate(select))
        except ValueError as error:
            raise ConfigError(f"environment {self.title}, select: {error}") from error

    def _rows(self, taskset: vf.Taskset, size: int) -> Sequence[Task]:
        from tinsmith.integrations.verifiers.tasks import rows

        return rows(taskset, size, lambda task: check_task(self._environment, task, self.title))


__all__ = ["VerifiersEnvironment"]
