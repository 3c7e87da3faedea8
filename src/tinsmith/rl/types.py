"""Data types of a run: Task, Message, Turn, Rollout, Group and Demonstration. All are frozen dataclasses.

A workflow runs a Task and returns Rollouts. A Rollout is a list of Turns with rewards; a Turn is one sampled reply. A
Group holds the Rollouts of one Task by one version of the policy, so that an algorithm can compare them. Turns and
rewards carry a role, so single-turn, multi-turn, tool-use and solver-judge workflows share these types.

Dimensions: G rollouts of a group, N prompt tokens of a turn, L sampled tokens of a turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

POLICY = "policy"
"""Role of the model in training; the only role in a single-turn workflow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A chat message.

    Example: Message(role="user", content="What is 39 + 13? Answer with the number only.")
    """

    role: str
    """Role for the chat template: system, user, assistant or tool."""
    content: str
    """Text of the message."""
    more: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Further fields for the chat template, such as tool_calls and name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A prompt and the data that rewards need to score a reply.

    Example: Task(id="addition/2042", messages=(Message(role="user", content="What is 39 + 13?"),), answer="52")
    """

    id: str
    """Name of the source and index within it, such as gsm8k/17; stable across runs of the same run file."""
    messages: tuple[Message, ...]
    """The prompt. If the last message is the assistant's, the policy continues it."""
    answer: str = ""
    """Reference answer; empty if there is none, or if `extra` holds it."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further JSON-serializable data for workflows and rewards, such as a reasoning-gym entry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """A reply from a dataset to train on, or a pair of a better and a worse reply.

    Example: Demonstration(id="addition/2042", messages=(question, Message(role="assistant", content="52")))
    """

    id: str
    """Name of the source and index within it."""
    messages: tuple[Message, ...]
    """A chat that ends with the reply to learn; of a pair, with the better reply."""
    rejected: tuple[Message, ...] = ()
    """Of a pair: the chat that ends with the worse reply. Empty if there is no pair."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Tool definitions for the chat template."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A sampled reply and its prompt.

    Example: Turn(prompt=(1, 4093, 198), tokens=(37, 34, 2), logprobs=(-0.9, -0.4, -0.1), text="52", stop="stop")
    """

    prompt: tuple[int, ...]
    """[N] token ids before the reply, including earlier turns of the conversation."""
    tokens: tuple[int, ...]
    """[L] sampled token ids, including the stop token."""
    logprobs: tuple[float, ...]
    """[L] log-probabilities (nats) of `tokens` under the sampling distribution, at its temperature."""
    text: str
    """Decoded reply without the stop token or stop string; rewards read this."""
    stop: Literal["stop", "length"]
    """Why sampling ended: `stop` at a stop token or string, `length` at max_tokens."""
    role: str = POLICY
    """Role that sampled the reply; only turns of the policy are trained on."""
    version: int = 0
    """Number of updates of the weights that sampled the reply."""
    reward: float | None = None
    """Reward of this turn alone, if the workflow sets one; the rollout's reward covers all turns."""
    state: str = ""
    """Key of the environment state before the reply, equal for equal states; for algorithms that compare turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """An attempt at a task. A failed rollout has an `error` and is not trained on.

    Example: Rollout(turns=(turn,), rewards={"policy": 1.1}, reward_parts={"closeness": 1.0, "format": 1.0})
    """

    turns: tuple[Turn, ...] = ()
    """Sampled replies in order."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Reward by role: the weighted sum of the reward functions plus the workflow's own reward."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """Value of each reward function by name, before its weight."""
    error: str = ""
    """Reason of the failure; empty if the rollout succeeded."""

    @property
    def text(self) -> str:
        """Text of the last turn; empty if there are no turns."""
        return self.turns[-1].text if self.turns else ""

    @property
    def reward(self) -> float:
        """Reward of the policy; 0 if the rollout failed."""
        return self.rewards.get(POLICY, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Rollouts of one task by one version of the policy; algorithms compare them with each other.

    Example: Group(task=task, rollouts=(correct, wrong, failed), version=12)
    """

    task: Task
    """The task of all rollouts."""
    rollouts: tuple[Rollout, ...]
    """[G] rollouts, including failed ones."""
    version: int = 0
    """Number of updates of the weights that sampled the group."""

    @property
    def rewards(self) -> tuple[float, ...]:
        """Rewards of the rollouts that did not fail."""
        return tuple(rollout.reward for rollout in self.rollouts if not rollout.error)

    @property
    def constant(self) -> bool:
        """Whether a comparison has no signal: all rewards are equal, or fewer than two rollouts succeeded."""
        return len(set(self.rewards)) < 2
