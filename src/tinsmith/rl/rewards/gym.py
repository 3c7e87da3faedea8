"""The scoring functions of reasoning-gym's datasets."""

from __future__ import annotations

from typing import ClassVar, Literal

from typing_extensions import override

from tinsmith.rl.rewards.base import Score
from tinsmith.rl.rewards.compared import ComparedReward, Comparison
from tinsmith.rl.scoring.replies import last_tagged, spoken
from tinsmith.rl.types import Task


class ReasoningGymScore(ComparedReward):
    """Score of the reply by its reasoning-gym dataset, 0 to 1. Needs tasks of the source `reasoning_gym`.

    The reply is right if its score is 1; datasets give less to answers that are partly right.
    """

    wrong: ClassVar[float] = 0.0
    type: Literal["reasoning_gym"] = "reasoning_gym"
    tag: str = ""
    """Score only the text inside the last <tag>…</tag>; a reply without it scores 0. Empty: the whole reply after its
    thoughts."""

    @override
    def comparison(self, task: Task, text: str) -> Comparison | None:
        dataset = task.extra.get("metadata", {}).get("source_dataset")
        if not dataset:
            raise ValueError(f"{task.id} is not a task of reasoning-gym; use another reward")
        text = spoken(text)
        answer = (last_tagged(text, self.tag) or "") if self.tag else text
        return (
            Comparison("tinsmith.rl.scoring.reasoning:score", (dataset, answer, dict(task.extra))) if answer else None
        )

    @override
    def grade(self, task: Task, text: str, result: float) -> Score:
        return Score(value=result, correct=result >= 1.0 - 1e-9)
