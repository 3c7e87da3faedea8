"""Rewards for the form of a reply: its pattern and its length."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator, model_validator

from tinsmith.rl.policy.base import Snapshot
from tinsmith.rl.policy.training_rows import count_policy_tokens
from tinsmith.rl.rewards.base import Reward
from tinsmith.rl.types import Rollout, Task

THINK_ANSWER = r".*?<think>.*?</think>\s*<answer>.*?</answer>"
"""Thoughts, then the answer, and nothing after it."""


class Format(Reward):
    """`right` where the whole reply matches a pattern, else `wrong`."""

    type: Literal["format"] = "format"
    pattern: str = THINK_ANSWER
    """A regular expression; a dot matches line ends too. The default is <think>…</think> <answer>…</answer>."""
    right: float = 1.0
    """What a match is worth."""
    wrong: float = 0.0
    """What anything else is worth."""

    @field_validator("pattern")
    @classmethod
    def _can_be_read(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"the pattern {pattern!r} is not one: {error}") from error
        return pattern

    def score(self, task: Task, text: str) -> float:
        """White space around the reply does not count."""
        return self.right if re.fullmatch(self.pattern, text.strip(), re.DOTALL) else self.wrong


class Overlong(Reward):
    """0 up to `max_tokens - margin` sampled tokens, then in a line to -1 at `max_tokens` (DAPO, arXiv 2503.14476)."""

    type: Literal["overlong"] = "overlong"
    max_tokens: int = Field(ge=1)
    """Where the whole penalty is reached; replies are cut at sampling.max_tokens."""
    margin: int = Field(ge=1)
    """Over how many tokens it grows."""

    @model_validator(mode="after")
    def _margin_is_inside(self) -> Overlong:
        if self.margin >= self.max_tokens:
            raise ValueError("margin must be less than max_tokens")
        return self

    def score(self, task: Task, text: str) -> float:
        """A text alone has no tokens, and no penalty."""
        return 0.0

    async def judge(self, task: Task, rollout: Rollout, policy: Snapshot) -> float:
        """By the policy's tokens of the whole rollout."""
        over = count_policy_tokens(rollout) - (self.max_tokens - self.margin)
        return -min(1.0, max(0.0, over / self.margin))
