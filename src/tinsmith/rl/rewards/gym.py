"""The scorers of reasoning-gym's datasets."""

from __future__ import annotations

import re
from typing import Any, Literal, cast

from tinsmith.rl.rewards.base import Reward
from tinsmith.rl.types import Task


class ReasoningGymScore(Reward):
    """The dataset's own score of the reply, 0 to 1; for tasks of the source `reasoning_gym`."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    tag: str = ""
    """Score only what stands between <tag> and </tag>, if set; nothing there scores 0."""

    def score(self, task: Task, text: str) -> float:
        """Raises ValueError for a task of another source."""
        from reasoning_gym import get_score_answer_fn

        dataset = task.extra.get("metadata", {}).get("source_dataset")
        if not dataset:
            raise ValueError(f"{task.id} is no task of reasoning-gym; use another reward")
        answer = text.strip()
        if self.tag:
            found = re.findall(rf"<{self.tag}>(.*?)</{self.tag}>", text, re.DOTALL)
            answer = found[-1].strip() if found else ""
        scorer = cast(Any, get_score_answer_fn(dataset))  # its type is that of an unbound method
        return float(scorer(answer, dict(task.extra))) if answer else 0.0
