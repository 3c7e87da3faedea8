"""Scores by the datasets of reasoning-gym."""

from __future__ import annotations

from typing import Any, cast

from reasoning_gym import get_score_answer_fn


def score(dataset: str, answer: str, entry: dict[str, Any]) -> float:
    """Score of an answer to an entry of the dataset, 0 to 1."""
    scorer = cast(Any, get_score_answer_fn(dataset))  # declared as an unbound method
    return float(scorer(answer, entry))
