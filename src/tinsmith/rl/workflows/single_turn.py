"""Ask once, score the reply."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Literal

from tinsmith.rl.policy.base import Snapshot
from tinsmith.rl.types import Message, Rollout, Task
from tinsmith.rl.workflows.base import Workflow, WorkflowContext, WorkflowOptions, score_turns

THINK = (
    "Think the question through before you answer it. Write your thoughts between <think> and </think>, and after "
    "them the answer between <answer> and </answer>, like this: <think> thoughts </think> <answer> answer </answer>."
)


class SingleTurnConfig(WorkflowOptions):
    """One prompt, one reply."""

    type: Literal["single_turn"] = "single_turn"
    system: str = ""
    """A system message before each task that has none; empty: what the model's chat template puts there."""
    reply_prefix: str = ""
    """How every reply begins: the policy goes on from it, and rewards read it too."""

    @property
    def provides_states(self) -> bool:
        """There is one turn."""
        return False

    def make(self, parts: WorkflowContext) -> Workflow:
        """The same for every kind of single turn."""
        return SingleTurnWorkflow(self.system, self.reply_prefix, parts)


class MathConfig(WorkflowOptions):
    """One prompt, one reply, with a system message that asks for <think> and <answer>."""

    type: Literal["math"] = "math"
    system: str = THINK
    """A system message before each task that has none."""
    reply_prefix: str = ""
    """How every reply begins: the policy goes on from it, and rewards read it too."""

    @property
    def provides_states(self) -> bool:
        """There is one turn."""
        return False

    def make(self, parts: WorkflowContext) -> Workflow:
        """A single turn."""
        return SingleTurnWorkflow(self.system, self.reply_prefix, parts)


class SingleTurnWorkflow:
    """All replies to one task come from one request, so that the server computes the prompt once."""

    def __init__(self, system: str, reply_prefix: str, parts: WorkflowContext) -> None:
        self._system, self._prefix, self._parts = system, reply_prefix, parts

    async def run(self, task: Task, policy: Snapshot, *, count: int, seed: int) -> tuple[Rollout, ...]:
        """`count` replies, each a rollout."""
        messages = with_system_message(task, self._system)
        if self._prefix:
            messages = (*messages, Message(role="assistant", content=self._prefix))
        begun = messages[-1].content if messages[-1].role == "assistant" else ""
        turns = await policy.sample(messages, count=count, seed=seed, sampling=self._parts.sampling)
        read = [replace(turn, text=begun + turn.text) for turn in turns]
        return tuple(await asyncio.gather(*(score_turns(task, (one,), self._parts.rewards, policy) for one in read)))


def with_system_message(task: Task, system: str) -> tuple[Message, ...]:
    """A task's messages, with a system message first if they have none and one is wanted."""
    if not system or (task.messages and task.messages[0].role == "system"):
        return task.messages
    return (Message(role="system", content=system), *task.messages)
