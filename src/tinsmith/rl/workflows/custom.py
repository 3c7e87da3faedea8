"""Custom workflows: user code, selected by its import path: an async function, a class with `run`, or settings."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable
from functools import cached_property
from typing import Any, Literal, Protocol, runtime_checkable

from pydantic import Field, model_validator
from typing_extensions import override

from tinsmith.chat.request import PromptTooLong
from tinsmith.rl.guards.user_code import describe, is_fault
from tinsmith.rl.plugins import OWN_KEYS, Arguments, ImportPath, check_signature, import_object, path_text, validated
from tinsmith.rl.policy.sampling import Snapshot
from tinsmith.rl.types import Rollout, Task
from tinsmith.rl.workflows.base import (
    NO_REWARD,
    AdaptedWorkflow,
    IndependentRollouts,
    Workflow,
    WorkflowContext,
    WorkflowOptions,
    add_rewards,
    score_turns,
)
from tinsmith.rl.workflows.conversation import Conversation, Terminated, WorkflowPolicy


class CustomConfig(WorkflowOptions):
    """User code: an async function of (task, conversation), a class with an async method run(task, policy), or a
    WorkflowOptions class.

    The function is called once per rollout. It may return a reward, a number or a mapping of named numbers, which is
    added to those of the run. The class is created once per run; its `run` is called once per rollout and returns a
    Rollout, or nothing for one with all of the rollout's conversations.
    """

    type: Literal["custom"] = "custom"
    path: ImportPath
    """Import path, module:attribute: `my_package.flows:debate`, or `debate:flow` for debate.py in `plugins`. From
    Python, also the function or class itself."""
    args: Arguments = Field(default_factory=dict)
    """Keyword arguments of the function or class, or fields of the WorkflowOptions class."""
    timeout: float | None = Field(default=None, gt=0)
    """Time limit of one rollout, in seconds, for a class with `run`: what was sampled until then is kept. Not set:
    rollout.timeout, after which the rollout has failed."""

    @model_validator(mode="after")
    def _check_path(self) -> CustomConfig:
        target = self._target
        if self.timeout is not None and (isinstance(target, WorkflowOptions) or not _has_run(target)):
            raise ValueError("timeout applies to a class with run(task, policy); use rollout.timeout")
        return self

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
        if _has_run(target):
            if not inspect.iscoroutinefunction(target.run):
                raise ValueError(f"{path}.run is not an async function; define it with async def")
            own = ("self",) if isinstance(target, type) else ()
            check_signature(target.run, f"{path}.run", (*own, "task", "policy"), {})
            if own:
                check_signature(target, path, (), self.args, OWN_KEYS["workflow"])
            return target
        if not inspect.iscoroutinefunction(target):
            raise ValueError(
                f"{path} is neither an async function, nor a class with an async run(task, policy), nor a "
                "WorkflowOptions class"
            )
        check_signature(target, path, ("task", "conversation"), self.args, OWN_KEYS["workflow"])
        return target

    @override
    def make(self, context: WorkflowContext) -> Workflow:
        target = self._target
        if isinstance(target, WorkflowOptions):
            return target.make(context)
        if _has_run(target):
            created = target(**self.args) if isinstance(target, type) else target
            return RoleWorkflow(created, self.timeout, context)
        return FunctionWorkflow(target, self.args, context)


@runtime_checkable
class _RunsRollouts(Protocol):
    """An object that runs rollouts of several roles."""

    def run(self, task: Task, policy: WorkflowPolicy) -> Awaitable[Rollout | None]: ...


def _has_run(target: Any) -> bool:
    return issubclass(target, _RunsRollouts) if isinstance(target, type) else isinstance(target, _RunsRollouts)


class FunctionWorkflow(IndependentRollouts):
    """Calls the function once per rollout, concurrently."""

    def __init__(self, function: Any, args: dict[str, Any], context: WorkflowContext) -> None:
        self._function, self._args, self._context = function, args, context

    @override
    async def rollout(self, task: Task, policy: Snapshot, seed: int) -> Rollout:
        conversation = Conversation(policy, self._context.sampling, seed)
        try:
            reward = await self._function(task, conversation, **self._args)
        except BaseException as error:
            if not is_fault(error):
                raise
            return Rollout.single(conversation.turns).failed(describe(error))
        if not conversation.turns:
            return Rollout(error="the workflow sampled no reply")
        return await score_turns(task, conversation.turns, self._context.rewards, policy, reward)


class RoleWorkflow(IndependentRollouts):
    """Calls `run` of a user's object once per rollout, concurrently, each with a WorkflowPolicy of its own."""

    def __init__(self, target: Any, timeout: float | None, context: WorkflowContext) -> None:
        self._target, self._timeout, self._context = target, timeout, context

    @override
    async def rollout(self, task: Task, policy: Snapshot, seed: int) -> Rollout:
        context = self._context
        own = WorkflowPolicy(policy, context.sampling, seed, context.store, context.evaluating, context.rewards.pool)
        rollout = await self._attempt(task, own)
        if rollout.error:
            return rollout
        if not rollout.turns:
            return rollout.failed("the workflow sampled no reply")
        return await add_rewards(task, rollout, context.rewards, policy)

    async def _attempt(self, task: Task, policy: WorkflowPolicy) -> Rollout:
        """The rollout that `run` returns, or what was sampled until it ended early. A rollout that ended early and has
        no reward has reward 0."""
        clock = asyncio.timeout(self._timeout)
        try:
            async with clock:
                result = await self._target.run(task, policy)
        except Terminated as end:
            return policy.rollout(termination=end.reason)
        except PromptTooLong:
            return policy.rollout(termination="max_prompt")
        except BaseException as error:
            if isinstance(error, TimeoutError) and clock.expired():
                return policy.rollout(termination="timeout")
            if not is_fault(error):
                raise
            return policy.rollout().failed(describe(error))
        if isinstance(result, Rollout):
            return result
        if result is not None:
            return policy.rollout().failed(f"run returned {type(result).__name__}; return a Rollout, or nothing")
        if policy.without_reward and not self._context.rewards.configured and self._context.rewards.needed:
            return policy.rollout().failed(f"{NO_REWARD} to {policy.without_reward[0]}")
        return policy.rollout()
