"""Multi-turn workflows: a conversation between the policy and an environment of the user.

The turns of a rollout form one training row; the messages of the environment are masked out of the loss.
"""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import Field, model_validator
from typing_extensions import override

from tinsmith.chat.request import PromptTooLong
from tinsmith.rl.guards.user_code import describe, is_fault
from tinsmith.rl.plugins import await_if_needed, check_signature, import_object
from tinsmith.rl.policy.sampling import Snapshot
from tinsmith.rl.types import Rollout, Task, Termination, Turn
from tinsmith.rl.workflows.base import IndependentRollouts, Workflow, WorkflowContext, WorkflowOptions, score_turns
from tinsmith.rl.workflows.conversation import Conversation
from tinsmith.rl.workflows.single_turn import with_system_message


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Response of an environment to a reply of the policy.

    Example: Answer(message="Too low.", reward=0.1, state="guessed 5")
    """

    message: str = ""
    """The next user message."""
    reward: float | None = None
    """Reward of this reply. The rewards of all replies are added up to the workflow's own reward."""
    done: bool = False
    """Whether the rollout ends here; `message` is then not sent."""
    state: str = ""
    """Name of the state that follows, equal for equal states; for advantages that compare turns in equal states."""


class Environment:
    """Base class of environments. `Environment(task, seed, **args)` is created for each rollout.

    A subclass implements `step`, and `begin` if it speaks first. Both may be async.

    Example:

        class Guess(Environment):
            def step(self, reply: Turn) -> Answer:
                right = reply.text.strip() == self.task.answer
                return Answer(message="Wrong, try again.", reward=float(right), done=right)
    """

    def __init__(self, task: Task, seed: int) -> None:
        """`seed` differs between the rollouts of a group, for environments with randomness."""
        self.task, self.seed = task, seed

    def begin(self) -> Answer | Awaitable[Answer]:
        """Return the response before the first reply; its message follows those of the task.

        By default there is no message, and the first state is the task's id.
        """
        return Answer(state=self.task.id)

    def step(self, reply: Turn) -> Answer | Awaitable[Answer]:
        """Return the response to a reply: the next message, or the end of the rollout."""
        raise NotImplementedError


class MultiTurnConfig(WorkflowOptions):
    """A conversation with a custom environment. The rewards of its steps are added up, and to those of the run."""

    type: Literal["multi_turn"] = "multi_turn"
    path: str
    """Import path, module:Class, of a subclass of Environment."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment class."""
    system: str = ""
    """System message for tasks that have none."""
    max_turns: int = Field(default=10, ge=1)
    """Maximum number of replies of a rollout."""

    @model_validator(mode="after")
    def _check_path(self) -> MultiTurnConfig:
        target = import_object(self.path)
        if not (isinstance(target, type) and issubclass(target, Environment)):
            raise ValueError(
                f"{self.path} is not a subclass of {Environment.__module__}.Environment; derive it from that class"
            )
        check_signature(target, self.path, ("task", "seed"), self.args)
        return self

    @property
    @override
    def provides_rewards(self) -> bool:
        return True

    @override
    def make(self, context: WorkflowContext) -> Workflow:
        return MultiTurnWorkflow(self, context)


class MultiTurnWorkflow(IndependentRollouts):
    """Plays the rollouts of a task concurrently, each with its own environment."""

    def __init__(self, config: MultiTurnConfig, context: WorkflowContext) -> None:
        self._config, self._context, self._environment = config, context, import_object(config.path)

    @override
    async def rollout(self, task: Task, policy: Snapshot, seed: int) -> Rollout:
        """Play a rollout. A prompt that becomes too long ends it; any other exception fails it."""
        conversation = Conversation(policy, self._context.sampling, seed)
        termination: Termination = "max_prompt"
        try:
            termination = await self._play(task, conversation, self._environment(task, seed, **self._config.args))
        except BaseException as error:
            if not is_fault(error):
                raise
            if not (isinstance(error, PromptTooLong) and conversation.turns):
                return Rollout.single(conversation.turns).failed(describe(error))
        rollout = await score_turns(task, conversation.turns, self._context.rewards, policy, conversation.total_reward)
        return rollout if rollout.error else replace(rollout, termination=termination)

    async def _play(self, task: Task, conversation: Conversation, environment: Environment) -> Termination:
        answer: Answer = await await_if_needed(environment.begin())
        messages = [*with_system_message(task, self._config.system), *([answer.message] if answer.message else [])]
        for _ in range(self._config.max_turns):
            if answer.done:
                return "done"
            reply = await conversation.say(*messages, state=answer.state)
            answer = await await_if_needed(environment.step(reply))
            if answer.reward is not None:
                conversation.credit(answer.reward)
            messages = [answer.message]
        return "done" if answer.done else "max_turns"
