"""The implicit reward of a model that was trained on preferences: how much more it likes a reply than its reference."""

from __future__ import annotations

import asyncio
from typing import Literal

import numpy as np
from pydantic import Field
from typing_extensions import override

from tinsmith.rl.policy.sampling import Snapshot
from tinsmith.rl.rewards.base import Reward
from tinsmith.rl.types import Rollout, Task, Turn


class ImplicitReward(Reward):
    """beta (log p - log p_ref) of the tokens that the policy sampled: the reward that dpo, ipo and kto teach to a model
    p relative to its reference (arXiv 2305.18290, equation 5, without the part that depends on the task alone)."""

    type: Literal["implicit_reward"] = "implicit_reward"
    model: str = Field(min_length=1)
    """tinker:// path of a checkpoint of the training on preferences, on the policy's server. It has the policy's
    tokenizer."""
    reference: str = ""
    """Reference of that training: a base model or a tinker:// path. Empty: the run's base model."""
    beta: float = Field(default=0.1, gt=0)
    """Scale of the reward: that of the training."""
    per_token: bool = False
    """Divide by the number of tokens, so that long replies do not get larger rewards because they are long."""

    @override
    async def judge(self, task: Task, rollout: Rollout, policy: Snapshot) -> float:
        """The reward of all turns of the policy, with one request to each model for a turn.

        Raises ValueError if there is no such turn, or if a model has another tokenizer.
        """
        turns = [turn for turn in rollout.turns if turn.tokens and not turn.model]
        if not turns:
            raise ValueError(f"{self.title} scores tokens of the policy, and it sampled none")
        model, reference = await asyncio.gather(
            *(self._logprobs(name, turns, policy) for name in (self.model, self.reference))
        )
        difference = model - reference
        return self.beta * float(difference.mean() if self.per_token else difference.sum())

    async def _logprobs(self, name: str, turns: list[Turn], policy: Snapshot) -> np.ndarray:
        """Logprobs of the tokens of all turns by a model, float64 [T]."""
        model = await policy.open_model(name)
        if any(model.chat.decode(turn.tokens) != policy.chat.decode(turn.tokens) for turn in turns):
            raise ValueError(f"{self.title}: {name} has another tokenizer than the policy; name a model with the same")
        scored = await asyncio.gather(*(model.logprobs(turn.sequence, last=len(turn.tokens)) for turn in turns))
        return np.concatenate(scored).astype(np.float64)
