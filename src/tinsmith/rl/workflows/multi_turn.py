"""A conversation with an environment of the user's own: it answers each reply, or ends the rollout.

All turns of a rollout are one row to train on, what the environment said being outside of the mask.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, model_validator

from tinsmith.chat.request import PromptTooLong
from tinsmith.rl.plugins import await_if_needed, check_signature, import_object
from tinsmith.rl.policy.base import Snapshot, request_seed
from tinsmith.rl.types import Rollout, Task, Turn
from tinsmith.rl.workflows.base import Workflow, WorkflowContext, WorkflowOptions, score_turns
from tinsmith.rl.workflows.custom import Conversation
from tinsmith.rl.workflows.single_turn import with_system_message


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The response of an environment to a reply.

    Example: Answer(message="Too low.", reward=0.1, state="guessed 5")
    """

    message: str = ""
    """The next message of the user."""
    reward: float | None = None
    """What the reply alone was worth."""
    done: bool = False
    """The rollout ends here; the message is not said."""
    state: str = ""
    """What the policy looks at next, as a word equal for equal states; for algorithms that compare turns."""


class Environment:
    """Base class of environments. One is created per rollout: `Environment(task, seed, **args)`."""

    def __init__(self, task: Task, seed: int) -> None:
        """`seed` is the rollout's own, for environments that draw; rollouts of a group share the task alone."""
        self.task, self.seed = task, seed

    def begin(self) -> Answer | Awaitable[Answer]:
        """What is said after the task's own messages, before the first reply; nothing unless overridden.

        The state then is the task itself.
        """
        return Answer(state=self.task.id)

    def step(self, reply: Turn) -> Answer | Awaitable[Answer]:
        """The response to a reply."""
        raise NotImplementedError


class MultiTurnConfig(WorkflowOptions):
    """A conversation with an environment. A rollout is worth the sum of its step rewards, and what `rewards` say."""

    type: Literal["multi_turn"] = "multi_turn"
    path: str
    """module:Class of an Environment of your own."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment."""
    system: str = ""
    """A system message before each task that has none."""
    max_turns: int = Field(default=10, ge=1)
    """Replies at most."""

    @model_validator(mode="after")
    def _can_be_used(self) -> MultiTurnConfig:
        thing = import_object(self.path)
        if not (isinstance(thing, type) and issubclass(thing, Environment)):
            raise ValueError(f"{self.path} is no {Environment.__module__}.Environment; derive it from that")
        check_signature(thing, self.path, 2, self.args)
        return self

    @property
    def provides_rewards(self) -> bool:
        """Those of the environment."""
        return True

    def make(self, parts: WorkflowContext) -> Workflow:
        """The workflow."""
        return MultiTurnWorkflow(self, parts)


class MultiTurnWorkflow:
    """Rollouts of a task go side by side."""

    def __init__(self, config: MultiTurnConfig, parts: WorkflowContext) -> None:
        self._config, self._parts, self._environment = config, parts, import_object(config.path)

    async def run(self, task: Task, policy: Snapshot, *, count: int, seed: int) -> tuple[Rollout, ...]:
        """`count` conversations."""
        return tuple(await asyncio.gather(*(self._one(task, policy, request_seed(seed, at)) for at in range(count))))

    async def _one(self, task: Task, policy: Snapshot, seed: int) -> Rollout:
        """A prompt that grows too long ends the rollout where it is; what fails makes it a failed one."""
        conversation = Conversation(policy, self._parts.sampling, seed)
        try:
            await self._play(task, conversation, self._environment(task, seed, **self._config.args))
        except Exception as error:  # noqa: BLE001  an environment is the user's code, and one rollout's fault is not the group's
            if not (isinstance(error, PromptTooLong) and conversation.turns):
                return Rollout(turns=conversation.turns, error=f"{type(error).__name__}: {error}")
        given = [turn.reward for turn in conversation.turns if turn.reward is not None]
        return await score_turns(task, conversation.turns, self._parts.rewards, policy, sum(given) if given else None)

    async def _play(self, task: Task, conversation: Conversation, environment: Environment) -> None:
        answer: Answer = await await_if_needed(environment.begin())
        said = [*with_system_message(task, self._config.system), *([answer.message] if answer.message else [])]
        for _ in range(self._config.max_turns):
            if answer.done:
                return
            reply = await conversation.say(*said, state=answer.state)
            answer = await await_if_needed(environment.step(reply))
            if answer.reward is not None:
                conversation.credit(answer.reward)
            said = [answer.message]
