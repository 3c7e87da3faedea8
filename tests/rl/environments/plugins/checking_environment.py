"""An environment that fails rollouts with the task or sampling of another environment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from typing_extensions import override

from tinsmith.rl.environments.base import EnvironmentOptions
from tinsmith.rl.plugins import environment, reward, workflow
from tinsmith.rl.types import Message, Rollout, Task
from tinsmith.rl.workflows.base import WorkflowPolicy
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
    async def rollout(self, task: Task, policy: WorkflowPolicy, seed: int) -> Rollout:
        sampling = policy.sampling
        assert task.environment == self.title
        assert task.answer == self.label
        assert sampling.max_tokens == self.sampling["max_tokens"]
        assert sampling.temperature == (0 if policy.evaluating else self.sampling["temperature"])
        (turn,) = await policy.snapshot.sample(task.messages, count=1, seed=seed, sampling=sampling)
        right = turn.text == self.label
        return replace(Rollout.single((turn,), float(right), correct=right), metrics={"rows": self.rows})


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
