"""Custom workflows: user code, selected by its import path: an async function, a class with `run`, or settings."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable
from functools import cached_property
from typing import Any, Literal, Protocol, runtime_checkable

from typing_extensions import override

from tinsmith.rl.plugins import KINDS, check_signature, import_object, path_text, validated
from tinsmith.rl.rewards.base import RewardValue
from tinsmith.rl.types import Rollout, Task
from tinsmith.rl.workflows.agent import AGENT_ARGUMENTS, AgentConfig
from tinsmith.rl.workflows.base import (
    AdaptedWorkflow,
    IndependentRollouts,
    Workflow,
    WorkflowContext,
    WorkflowOptions,
    WorkflowPolicy,
)
from tinsmith.rl.workflows.multi_turn import Environment, MultiTurnConfig
from tinsmith.rl.workflows.user_code import UserWorkflow


class CustomConfig(UserWorkflow):
    """User code: an async function of (task, conversation), a class with an async method run(task, policy), an agent,
    an Environment, or a WorkflowOptions class.

    The function is called once per rollout. It may return a reward, a number or a mapping of named numbers, which is
    added to those of the run. The class is created once per run; its `run` is called once per rollout and returns a
    Rollout, or nothing for one with all of the rollout's conversations. Agents and Environments are those of the types
    agent and multi_turn, with their defaults.
    """

    type: Literal["custom"] = "custom"

    @override
    def check_code(self) -> None:
        target = self._target
        if self.timeout is not None and isinstance(target, WorkflowOptions) and not isinstance(target, UserWorkflow):
            raise ValueError(f"{path_text(self.path)} has settings of its own, without timeout; use rollout.timeout")

    @property
    @override
    def provides_rewards(self) -> bool:
        return self._target.provides_rewards if isinstance(self._target, WorkflowOptions) else True

    @property
    @override
    def provides_states(self) -> bool:
        return self._target.provides_states if isinstance(self._target, WorkflowOptions) else True

    @cached_property
    def _target(self) -> Any:
        """A WorkflowOptions object, a class or a function. Raises ValueError for a wrong path or wrong arguments."""
        target, path = import_object(self.path), path_text(self.path)
        if isinstance(target, type) and issubclass(target, WorkflowOptions):
            if target.has_tasks:
                raise ValueError(f"{path} is an environment, with tasks of its own; list it in environments")
            return validated(target, path, self.args)
        if isinstance(target, AdaptedWorkflow) or (isinstance(target, type) and issubclass(target, AdaptedWorkflow)):
            return target.workflow_options(self.args)
        if (kind := workflow_class(target)) is not CustomConfig:
            return validated(kind, "", {"path": target, "args": self.args, "timeout": self.timeout})
        if _has_run(target):
            if not inspect.iscoroutinefunction(target.run):
                raise ValueError(f"{path}.run is not an async function; define it with async def")
            own = ("self",) if isinstance(target, type) else ()
            check_signature(target.run, f"{path}.run", (*own, "task", "policy"), {})
            if own:
                check_signature(target, path, (), self.args, KINDS["workflow"].own_keys)
            return target
        if not inspect.iscoroutinefunction(target):
            raise ValueError(
                f"{path} is neither an async function, nor a class with an async run(task, policy), nor a "
                "WorkflowOptions class"
            )
        check_signature(target, path, ("task", "conversation"), self.args, KINDS["workflow"].own_keys)
        return target

    @override
    async def rollout(self, task: Task, policy: WorkflowPolicy, seed: int) -> RewardValue | None:
        return await self._target(task, policy.conversation(), **self.args)

    @override
    def make(self, context: WorkflowContext) -> Workflow:
        target = self._target
        if isinstance(target, WorkflowOptions):
            return target.make(context)
        if not _has_run(target):
            return super().make(context)
        created = target(**self.args) if isinstance(target, type) else target
        return IndependentRollouts(lambda task, policy, seed: created.run(task, policy), context, self.timeout)


@runtime_checkable
class _RunsRollouts(Protocol):
    """An object that runs rollouts of several roles."""

    def run(self, task: Task, policy: WorkflowPolicy) -> Awaitable[Rollout | None]: ...


def _has_run(target: Any) -> bool:
    return issubclass(target, _RunsRollouts) if isinstance(target, type) else isinstance(target, _RunsRollouts)


def workflow_class(code: Any) -> type[UserWorkflow]:
    """The settings class of workflows for user code: an Environment, an agent, or any other."""
    if isinstance(code, type) and issubclass(code, Environment):
        return MultiTurnConfig
    if inspect.isfunction(code) and set(AGENT_ARGUMENTS) <= inspect.signature(code).parameters.keys():
        return AgentConfig
    return CustomConfig
