"""What passes through a run: Task -> Turn -> Rollout -> Group. Frozen records; no behaviour beyond reading them.

A rollout is a list of turns, each turn is spoken by one role, rewards are by role, and a group compares rollouts of one
task: so single-turn, multi-turn, tools, and solver with judge are one shape.

Dimensions: P groups of a step, G rollouts of a group, N prompt tokens, L sampled tokens of a turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

POLICY = "policy"
"""The role of the model in training; the only one in a single-turn workflow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a chat.

    Example: Message(role="user", content="What is 39 + 13? Answer with the number only.")
    """

    role: str
    content: str
    more: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """What else a chat template may read of it, as tool_calls and name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One thing to ask, and what is needed to judge the answer.

    Example: Task(id="addition/2042", messages=(Message(role="user", content="What is 39 + 13?"),), answer="52")
    """

    id: str
    """Source and index; the same in every run of the same file."""
    messages: tuple[Message, ...]
    answer: str = ""
    """What is right; empty where only `extra` tells."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What a source's own scorer wants back, as reasoning-gym's entry; plain JSON values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """What somebody else said, to learn from.

    Example: Demonstration(id="addition/2042", messages=(question, Message(role="assistant", content="52")))
    """

    id: str
    messages: tuple[Message, ...]
    """A chat that ends with the reply to learn."""
    rejected: tuple[Message, ...] = ()
    """Of a pair: the chat with the worse reply at its end."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Tools for the chat template."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One sampled reply and the prompt that it follows.

    Example: Turn(prompt=(1, 4093, 198), tokens=(37, 34, 2), logprobs=(-0.9, -0.4, -0.1), text="52", stop="stop")
    """

    prompt: tuple[int, ...]
    """[N] tokens before the reply, of any role."""
    tokens: tuple[int, ...]
    """[L] sampled tokens, the stop token among them."""
    logprobs: tuple[float, ...]
    """[L] of the sampler, at its temperature."""
    text: str
    """The reply as read by rewards: decoded, without the stop token or stop string."""
    stop: Literal["stop", "length"]
    role: str = POLICY
    version: int = 0
    """How many updates the weights that spoke had seen."""
    reward: float | None = None
    """Of this turn alone, where the workflow knows one; the rollout's reward is the whole."""
    state: str = ""
    """What the policy was looking at, as a word equal for equal states; for algorithms that compare turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One attempt at a task. A failed one is data: `error` says why and there is nothing to train on.

    Example: Rollout(turns=(turn,), rewards={"policy": 1.1}, reward_parts={"closeness": 1.0, "format": 1.0})
    """

    turns: tuple[Turn, ...] = ()
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Weighted sum by role."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """Each named reward before its weight."""
    error: str = ""

    @property
    def text(self) -> str:
        """The last thing said."""
        return self.turns[-1].text if self.turns else ""

    @property
    def reward(self) -> float:
        """Of the policy's role; 0 where the rollout failed."""
        return self.rewards.get(POLICY, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Rollouts of one task by one version of the policy, to be compared with each other.

    Example: Group(task=task, rollouts=(right, wrong, failed), version=12)
    """

    task: Task
    rollouts: tuple[Rollout, ...]
    """[G], failed ones among them."""
    version: int = 0

    @property
    def rewards(self) -> tuple[float, ...]:
        """Of the rollouts that did not fail."""
        return tuple(rollout.reward for rollout in self.rollouts if not rollout.error)

    @property
    def constant(self) -> bool:
        """Whether comparing teaches nothing: all rewards equal, or fewer than two rollouts left."""
        return len(set(self.rewards)) < 2
