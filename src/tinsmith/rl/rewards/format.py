"""Rewards for the format and the length of a reply."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator, model_validator
from typing_extensions import override

from tinsmith.rl.policy.sampling import Snapshot
from tinsmith.rl.rewards.base import Reward
from tinsmith.rl.types import Rollout, Task

THINK_ANSWER = r".*?<think>.*?</think>\s*<answer>.*?</answer>"
"""Thoughts, then an answer, then nothing."""


class Format(Reward):
    """`right` if the whole reply matches a pattern, else `wrong`. White space around the reply is ignored."""

    type: Literal["format"] = "format"
    pattern: str = THINK_ANSWER
    """Regular expression; `.` also matches line breaks. The default is <think>…</think> <answer>…</answer>."""
    right: float = 1.0
    """Reward of a match."""
    wrong: float = 0.0
    """Reward of any other reply."""

    @field_validator("pattern")
    @classmethod
    def _check_pattern(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
        return pattern

    @override
    def score(self, task: Task, text: str) -> float:
        return self.right if matches(self.pattern, text) else self.wrong


class Overlong(Reward):
    """Length penalty of DAPO (arXiv 2503.14476), by the number of sampled tokens of the whole rollout.

    0 up to `max_tokens - margin`, then falling linearly to -1 at `max_tokens`.
    """

    type: Literal["overlong"] = "overlong"
    max_tokens: int = Field(ge=1)
    """Number of tokens with the full penalty. Replies themselves end at sampling.max_tokens."""
    margin: int = Field(ge=1)
    """Number of tokens over which the penalty grows."""

    @model_validator(mode="after")
    def _check_margin(self) -> Overlong:
        if self.margin >= self.max_tokens:
            raise ValueError("margin must be less than max_tokens")
        return self

    @override
    def score(self, task: Task, text: str) -> float:
        return 0.0  # a text without its tokens has no length

    @override
    async def judge(self, task: Task, rollout: Rollout, policy: Snapshot) -> float:
        excess = rollout.sampled_tokens - (self.max_tokens - self.margin)
        return -min(1.0, max(0.0, excess / self.margin))


def matches(pattern: str, text: str) -> bool:
    """Whether the pattern matches the whole text. White space around the text is ignored; `.` matches line breaks.

    The default pattern is matched in linear time; backtracking is cubic in the number of tags of a reply.
    """
    text = text.strip()
    if pattern != THINK_ANSWER:
        return re.fullmatch(pattern, text, re.DOTALL) is not None
    begin = text.find("<think>")
    thoughts = begin >= 0 and re.search(r"</think>\s*<answer>", text[begin + len("<think>") :])
    return bool(thoughts) and text.endswith("</answer>")
