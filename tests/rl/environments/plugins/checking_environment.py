"""An environment that fails rollouts with the task or sampling of another environment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from typing_extensions import override

from tinsmith.rl.environments.base import EnvironmentOptions
from tinsmith.rl.plugins import environment, reward, workflow
from tinsmith.rl.policy.sampling import Snapshot
from tinsmith.rl.types import Message, Rollout, Task
from tinsmith.rl.workflows.base import IndependentRollouts, Workflow, WorkflowContext
from tinsmith.rl.workflows.conversation import Conversation


@environment("checking")
class Checking(EnvironmentOptions):
    """Rewards the reply `label`."""

    label: str
    rows: int = 30
    held_out: int = 5

    @override
    def tasks(self) -> Sequence[Task]:
        return [
            Task(id=f"row/{row}", messages=(Message(role="user", content=f"{self.label} {row}"),), answer=self.label)
            for row in range(self.rows)
        ]

    @override
    def make(self, context: WorkflowContext) -> Workflow:
        return CheckingWorkflow(self, context)


@reward("says")
def says(task: Task, rollout: Rollout, text: str) -> float:
    """1 for a rollout that ends with `text`."""
    return float(rollout.text == text)


@workflow("twice")
async def twice(task: Task, conversation: Conversation) -> None:
    """Samples two replies, in two conversations."""
    await conversation.say(*task.messages)
    conversation.reset()
    await conversation.say(*task.messages)


class CheckingWorkflow(IndependentRollouts):
    """Replies to one prompt."""

    def __init__(self, options: Checking, context: WorkflowContext) -> None:
        self._options, self._context = options, context

    @override
    async def rollout(self, task: Task, policy: Snapshot, seed: int) -> Rollout:
        sampling, options = self._context.sampling, self._options
        assert task.environment == options.title
        assert task.answer == options.label
        assert sampling.max_tokens == options.sampling["max_tokens"]
        assert sampling.temperature == (0 if self._context.evaluating else options.sampling["temperature"])
        (turn,) = await policy.sample(task.messages, count=1, seed=seed, sampling=sampling)
        right = turn.text == options.label
        return replace(Rollout.single((turn,), float(right), correct=right), metrics={"rows": options.rows})
