"""Custom workflows: user code that holds a conversation with the policy, selected by its import path."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

from pydantic import Field, model_validator
from typing_extensions import override

from tinsmith.rl.plugins import check_signature, import_object, validated
from tinsmith.rl.policy.base import SamplingConfig, Snapshot, request_seed
from tinsmith.rl.types import Message, Rollout, Task, Turn
from tinsmith.rl.workflows.base import Workflow, WorkflowContext, WorkflowOptions, score_turns


class Conversation:
    """A conversation with the policy, as a custom workflow receives it.

    `say` appends messages and samples the reply; `reset` starts over with an empty history. All replies become the
    turns of the rollout.

    Example:

        @workflow("check")
        async def check(task: Task, conversation: Conversation) -> float:
            await conversation.say(*task.messages)
            reply = await conversation.say("Check your answer. Give the final number only.")
            return 1.0 if reply.text.strip() == task.answer else 0.0
    """

    def __init__(self, policy: Snapshot, sampling: SamplingConfig, seed: int) -> None:
        """`seed` belongs to the rollout; the seed of each reply is derived from it and the reply's index."""
        self.policy = policy
        self._sampling, self._seed = sampling, seed
        self._history: list[Message | Turn] = []
        self._turns: list[Turn] = []
        self._replies = 0

    @property
    def turns(self) -> tuple[Turn, ...]:
        """All replies so far, including those before a `reset`."""
        return tuple(self._turns)

    async def say(
        self,
        *messages: Message | str,
        state: str = "",
        tools: Sequence[Mapping[str, Any]] = (),
        sampling: Mapping[str, Any] | None = None,
    ) -> Turn:
        """Append messages to the conversation, sample the policy's reply, append it and return it.

        A string is a user message. `state` identifies the state of the environment, for advantages that compare turns
        in equal states. `tools` are passed to the chat template. `sampling` overrides sampling settings for this reply.
        Raises PromptTooLong if the conversation no longer fits in the model's context.
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
        """Set the reward of the last reply, for algorithms with a reward per turn."""
        self._turns[-1] = replace(self._turns[-1], reward=reward)

    def reset(self) -> None:
        """Clear the history. The next reply starts a new conversation, and so a new training row."""
        self._history = []


class CustomConfig(WorkflowOptions):
    """User code: an async function of (task, conversation), called once per rollout, or a WorkflowOptions class.

    The function may return a reward, a number or a mapping of named numbers, which is added to those of the run.
    """

    type: Literal["custom"] = "custom"
    path: str
    """Import path, module:attribute: `my_package.flows:debate`, or `debate:flow` for debate.py in `plugins`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function, or fields of the class."""

    @model_validator(mode="after")
    def _check_path(self) -> CustomConfig:
        _ = self._target
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
        """A WorkflowOptions object, or the function. Raises ValueError if the path or the arguments are wrong."""
        target = import_object(self.path)
        if isinstance(target, type) and issubclass(target, WorkflowOptions):
            return validated(target, self.path, self.args)
        if not inspect.iscoroutinefunction(target):
            raise ValueError(f"{self.path} is neither an async function nor a WorkflowOptions class")
        check_signature(target, self.path, 2, self.args)
        return target

    @override
    def make(self, context: WorkflowContext) -> Workflow:
        if isinstance(self._target, WorkflowOptions):
            return self._target.make(context)
        return FunctionWorkflow(self._target, self.args, context)


class FunctionWorkflow(Workflow):
    """Calls the function once per rollout, concurrently."""

    def __init__(self, function: Any, args: dict[str, Any], context: WorkflowContext) -> None:
        self._function, self._args, self._context = function, args, context

    @override
    async def run(self, task: Task, policy: Snapshot, *, count: int, seed: int) -> tuple[Rollout, ...]:
        seeds = (request_seed(seed, index) for index in range(count))
        return tuple(await asyncio.gather(*(self._rollout(task, policy, rollout_seed) for rollout_seed in seeds)))

    async def _rollout(self, task: Task, policy: Snapshot, seed: int) -> Rollout:
        conversation = Conversation(policy, self._context.sampling, seed)
        try:
            reward = await self._function(task, conversation, **self._args)
        except Exception as error:  # noqa: BLE001  user code: its error fails this rollout, not the group
            return Rollout(turns=conversation.turns, error=f"{type(error).__name__}: {error}")
        if not conversation.turns:
            return Rollout(error="the workflow sampled no reply")
        return await score_turns(task, conversation.turns, self._context.rewards, policy, reward)
