"""Custom workflows: a conversation with the policy, driven by user code that is named by its path."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

from pydantic import Field, model_validator

from tinsmith.rl.plugins import check_signature, import_object, validated
from tinsmith.rl.policy.base import SamplingConfig, Snapshot, request_seed
from tinsmith.rl.types import Message, Rollout, Task, Turn
from tinsmith.rl.workflows.base import Workflow, WorkflowContext, WorkflowOptions, score_turns


class Conversation:
    """A conversation with the policy. Each message continues the conversation until `reset`.

    Example: reply = await conversation.say("What is 39 + 13?")
    """

    def __init__(self, policy: Snapshot, sampling: SamplingConfig, seed: int) -> None:
        """`seed` is the rollout's own; each reply draws from it by its place."""
        self.policy = policy
        self._sampling, self._seed = sampling, seed
        self._history: list[Message | Turn] = []
        self._turns: list[Turn] = []
        self._replies = 0

    @property
    def turns(self) -> tuple[Turn, ...]:
        """All replies so far."""
        return tuple(self._turns)

    async def say(
        self,
        *messages: Message | str,
        state: str = "",
        tools: Sequence[Mapping[str, Any]] = (),
        sampling: Mapping[str, Any] | None = None,
    ) -> Turn:
        """Append messages (a string is a user message) and sample the policy's reply.

        `state` names what the policy is looking at, for algorithms that compare turns; `tools` go to the chat template;
        `sampling` changes settings of this reply. Raises PromptTooLong.
        """
        history = [
            *self._history,
            *(Message(role="user", content=message) if isinstance(message, str) else message for message in messages),
        ]
        settings = SamplingConfig.model_validate({**self._sampling.model_dump(), **(sampling or {})})
        prompt = self.policy.chat.prompt(history, tools)
        seed = request_seed(self._seed, self._replies)
        (turn,) = await self.policy.sample(prompt, count=1, seed=seed, sampling=settings)
        turn = replace(turn, state=state)
        self._replies += 1
        self._history = [*history, turn]
        self._turns.append(turn)
        return turn

    def credit(self, reward: float) -> None:
        """Set the reward of the last reply alone."""
        self._turns[-1] = replace(self._turns[-1], reward=reward)

    def reset(self) -> None:
        """Start a new conversation: the next reply starts a new training row."""
        self._history = []


class CustomConfig(WorkflowOptions):
    """Your own async function of (task, conversation), called once per rollout, or a WorkflowOptions class."""

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
    def provides_rewards(self) -> bool:
        """A function may return one."""
        return self._made.provides_rewards if isinstance(self._made, WorkflowOptions) else True

    @property
    def provides_states(self) -> bool:
        """A function may."""
        return self._made.provides_states if isinstance(self._made, WorkflowOptions) else True

    @cached_property
    def _made(self) -> Any:
        """WorkflowOptions, or the function. Raises ValueError."""
        thing = import_object(self.path)
        if isinstance(thing, type) and issubclass(thing, WorkflowOptions):
            return validated(thing, self.path, self.args)
        if not inspect.iscoroutinefunction(thing):
            raise ValueError(f"{self.path} is neither an async function nor a WorkflowOptions class")
        check_signature(thing, self.path, 2, self.args)
        return thing

    def make(self, parts: WorkflowContext) -> Workflow:
        """The class's own workflow, or one that calls the function."""
        if isinstance(self._made, WorkflowOptions):
            return self._made.make(parts)
        return FunctionWorkflow(self._made, self.args, parts)


class FunctionWorkflow:
    """Rollouts of a task go side by side, each a call of the function."""

    def __init__(self, function: Any, args: dict[str, Any], parts: WorkflowContext) -> None:
        self._function, self._args, self._parts = function, args, parts

    async def run(self, task: Task, policy: Snapshot, *, count: int, seed: int) -> tuple[Rollout, ...]:
        """`count` calls."""
        return tuple(await asyncio.gather(*(self._one(task, policy, request_seed(seed, at)) for at in range(count))))

    async def _one(self, task: Task, policy: Snapshot, seed: int) -> Rollout:
        conversation = Conversation(policy, self._parts.sampling, seed)
        try:
            own = await self._function(task, conversation, **self._args)
        except Exception as error:  # noqa: BLE001  it is the user's code, and one rollout's fault is not the group's
            return Rollout(turns=conversation.turns, error=f"{type(error).__name__}: {error}")
        if not conversation.turns:
            return Rollout(error="the workflow sampled no reply")
        return await score_turns(task, conversation.turns, self._parts.rewards, policy, own)
