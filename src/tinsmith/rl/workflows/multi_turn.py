"""Multi-turn workflows: a conversation between the policy and an environment of the user.

The turns of a rollout form one training row; the messages of the environment are masked out of the loss.
"""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Literal

from pydantic import Field
from typing_extensions import override

from tinsmith.rl.plugins import await_if_needed, check_signature, import_object, path_text
from tinsmith.rl.types import Task, Turn
from tinsmith.rl.workflows.base import WorkflowPolicy
from tinsmith.rl.workflows.conversation import Terminated
from tinsmith.rl.workflows.single_turn import with_system_message
from tinsmith.rl.workflows.user_code import UserWorkflow


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


class MultiTurnConfig(UserWorkflow):
    """A conversation with a custom environment, a subclass of Environment that is created for each rollout. The
    rewards of its steps are added up, and to those of the run."""

    type: Literal["multi_turn"] = "multi_turn"
    system: str = ""
    """System message for tasks that have none."""
    max_turns: int = Field(default=10, ge=1)
    """Maximum number of replies of a rollout."""

    @override
    def check_code(self) -> None:
        target, path = import_object(self.path), path_text(self.path)
        if not (isinstance(target, type) and issubclass(target, Environment)):
            raise ValueError(
                f"{path} is not a subclass of {Environment.__module__}.Environment; derive it from that class"
            )
        check_signature(target, path, ("task", "seed"), self.args)

    @override
    async def rollout(self, task: Task, policy: WorkflowPolicy, seed: int) -> None:
        conversation = policy.conversation()
        environment: Environment = import_object(self.path)(task, seed, **self.args)
        answer: Answer = await await_if_needed(environment.begin())
        messages = [*with_system_message(task, self.system), *([answer.message] if answer.message else [])]
        while not answer.done:
            if len(conversation.turns) == self.max_turns:
                raise Terminated("max_turns")
            reply = await conversation.say(*messages, state=answer.state)
            answer = await await_if_needed(environment.step(reply))
            if answer.reward is not None:
                conversation.credit(answer.reward)
            messages = [answer.message]
