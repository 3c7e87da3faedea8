"""Single-turn workflows: one prompt, one reply."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Literal

from typing_extensions import override

from tinsmith.rl.policy.sampling import Snapshot
from tinsmith.rl.types import POLICY, Message, Rollout, Task
from tinsmith.rl.workflows.base import Workflow, WorkflowContext, WorkflowOptions
from tinsmith.rl.workflows.scoring import scored

THINK = (
    "Think the question through before you answer it. Write your thoughts between <think> and </think>, and after "
    "them the answer between <answer> and </answer>, like this: <think> thoughts </think> <answer> answer </answer>."
)


class _OneReply(WorkflowOptions):
    """Settings of workflows with one prompt and one reply."""

    system: str = ""
    """System message for tasks that have none. Empty: the default of the model's chat template."""
    reply_prefix: str = ""
    """Beginning of every reply. The policy continues from it; rewards read the reply with it."""

    @property
    @override
    def provides_states(self) -> bool:
        return False

    @override
    def make(self, context: WorkflowContext) -> Workflow:
        return SingleTurnWorkflow(self.system, self.reply_prefix, context)


class SingleTurnConfig(_OneReply):
    """One prompt, one reply."""

    type: Literal["single_turn"] = "single_turn"


class MathConfig(_OneReply):
    """One prompt, one reply, with a system message that requests <think>…</think> <answer>…</answer>."""

    type: Literal["math"] = "math"
    system: str = THINK
    """System message for tasks that have none."""


class SingleTurnWorkflow(Workflow):
    """Samples all replies to a task in one request, so that the server computes the prompt once."""

    def __init__(self, system: str, reply_prefix: str, context: WorkflowContext) -> None:
        self._system, self._prefix, self._context = system, reply_prefix, context

    @override
    async def run(self, task: Task, policy: Snapshot, *, count: int, seed: int) -> tuple[Rollout, ...]:
        messages = with_system_message(task, self._system)
        if self._prefix:
            messages = (*messages, Message(role="assistant", content=self._prefix))
        prefix = messages[-1].content if messages[-1].role == "assistant" else ""
        turns = await policy.sample(messages, count=count, seed=seed, sampling=self._context.sampling)
        rollouts = [Rollout.single((replace(turn, text=prefix + turn.text),)) for turn in turns]
        rewards = self._context.rewards
        return tuple(
            await asyncio.gather(*(scored(task, each, rewards, policy, without_reward=(POLICY,)) for each in rollouts))
        )


def with_system_message(task: Task, system: str) -> tuple[Message, ...]:
    """Return the task's messages, with the system message first if it is set and the task has none."""
    if not system or (task.messages and task.messages[0].role == "system"):
        return task.messages
    return (Message(role="system", content=system), *task.messages)
