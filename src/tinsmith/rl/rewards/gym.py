"""The scoring functions of reasoning-gym's datasets."""

from __future__ import annotations

from typing import Any, Literal, cast

from typing_extensions import override

from tinsmith.rl.rewards.base import Reward
from tinsmith.rl.rewards.tags import last_tagged
from tinsmith.rl.types import Task


class ReasoningGymScore(Reward):
    """Score of the reply by its reasoning-gym dataset, 0 to 1. Needs tasks of the source `reasoning_gym`."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    tag: str = ""
    """Score only the text inside the last <tag>…</tag>; a reply without it scores 0. Empty: the whole reply."""

    @override
    def score(self, task: Task, text: str) -> float:
        from reasoning_gym import get_score_answer_fn

        dataset = task.extra.get("metadata", {}).get("source_dataset")
        if not dataset:
            raise ValueError(f"{task.id} is not a task of reasoning-gym; use another reward")
        answer = text.strip()
        if self.tag:
            answer = last_tagged(text, self.tag) or ""
        scorer = cast(Any, get_score_answer_fn(dataset))  # declared as an unbound method
        return float(scorer(answer, dict(task.extra))) if answer else 0.0
