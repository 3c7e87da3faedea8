"""The score of a reward model, which was trained by the algorithm bradley_terry."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field
from typing_extensions import override

from tinsmith.rl.policy.chat import ANSWER, QUESTION, Verdict
from tinsmith.rl.policy.sampling import Snapshot
from tinsmith.rl.rewards.base import Reward
from tinsmith.rl.types import Message, Rollout, Task

_LARGEST_LOGPROB = -1e-9
"""Bound of the logprob: the odds are infinite at 0."""


class RewardModel(Reward):
    """log(P / (1 - P)), where P is the probability that a model answers `answer` to `question` after the reply. The
    model is a checkpoint of the algorithm `bradley_terry`; any other answers as it was trained to."""

    type: Literal["reward_model"] = "reward_model"
    model: str = Field(min_length=1)
    """tinker:// path of a sampler checkpoint, or base model, on the policy's server."""
    question: str = Field(default=QUESTION, min_length=1)
    """Question after the reply: that of the training."""
    answer: str = Field(default=ANSWER, min_length=1)
    """Answer whose first token is scored: that of the training."""

    @override
    async def judge(self, task: Task, rollout: Rollout, policy: Snapshot) -> float:
        """The score of the last reply, with one request for the logprob of a token."""
        model = await policy.open_model(self.model)
        chat = [*task.messages, Message(role="assistant", content=rollout.text)]
        tokens = Verdict(self.question, self.answer).tokens(model.chat, chat)
        logprob = min(float((await model.logprobs(tokens, last=1))[0]), _LARGEST_LOGPROB)
        return logprob - math.log(-math.expm1(logprob))
