"""Ask once, score the reply."""

from __future__ import annotations

from typing import Literal

from tinsmith.rl.policy import SamplingConfig, Snapshot
from tinsmith.rl.rewards import Rewards
from tinsmith.rl.types import Message, Rollout, Task
from tinsmith.rl.workflows.base import scored
from tinsmith.settings import Settings


class SingleTurnConfig(Settings):
    """One prompt, one reply."""

    type: Literal["single_turn"] = "single_turn"
    system: str = ""
    """A system message before each task; empty: what the model's chat template puts there."""


class SingleTurn:
    """All replies to one task come from one request, so that the server computes the prompt once."""

    def __init__(self, config: SingleTurnConfig, sampling: SamplingConfig, rewards: Rewards) -> None:
        self._system = (Message(role="system", content=config.system),) if config.system else ()
        self._sampling, self._rewards = sampling, rewards

    async def run(self, task: Task, policy: Snapshot, *, count: int, seed: int) -> tuple[Rollout, ...]:
        """`count` replies, each a rollout."""
        messages = (*self._system, *task.messages)
        turns = await policy.sample(messages, count=count, seed=seed, sampling=self._sampling)
        return tuple(scored(task, (turn,), self._rewards) for turn in turns)
