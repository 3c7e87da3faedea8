"""Rewards under the names of rLLM: a reward function maps (task, action) to a RewardOutput."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from tinsmith.errors import UserError
from tinsmith.integrations.rllm.records import Action
from tinsmith.rl.rewards.countdown import Countdown
from tinsmith.rl.rewards.mathematics import MathVerify
from tinsmith.rl.types import Message, Task


@dataclass
class RewardOutput:
    """The reward of an action."""

    reward: float
    is_correct: bool | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


class RewardFunction(Protocol):
    """Scores an action, text or an Action, for a task, a row of the dataset."""

    def __call__(self, task_info: dict[str, Any], action: str | Action, /) -> RewardOutput:
        """The reward of the action."""
        ...


def countdown_reward_fn(task_info: Mapping[str, Any], action: str | Action) -> RewardOutput:
    """1 if the expression in the last <answer> uses each of `nums` exactly once and equals `target`, else 0.

    The metadata say whether there is an answer, as partial credit. Raises UserError for a row without `target` and
    `nums`.
    """
    target, numbers = _field(task_info, "target"), _field(task_info, "nums", "numbers")
    answer = json.dumps({"target": str(target), "numbers": [str(number) for number in numbers]})
    score = Countdown().score(_task(task_info, answer), action_text(action))
    right = bool(score.correct)
    return RewardOutput(reward=float(right), is_correct=right, metadata={"partial_credit": 0 < score.value < 1})


def math_reward_fn(task_info: Mapping[str, Any], action: str | Action) -> RewardOutput:
    """1 if math-verify finds the reply equal to `ground_truth`, or to one of several, else 0.

    Raises UserError for a row with neither `ground_truth` nor `answer`.
    """
    truths, text = _field(task_info, "ground_truth", "answer"), action_text(action)
    several = truths if isinstance(truths, list | tuple) else [truths]
    right = any(MathVerify().score(_task(task_info, str(truth)), text).correct for truth in several)
    return RewardOutput(reward=float(right), is_correct=right)


def zero_reward(task_info: Mapping[str, Any], action: str | Action) -> RewardOutput:
    """Always 0."""
    return RewardOutput(reward=0.0, is_correct=False)


def action_text(action: Any) -> str:
    """The text of an action; empty for None."""
    value = action.action if isinstance(action, Action) else action
    return "" if value is None else str(value)


def _field(task_info: Mapping[str, Any], *names: str) -> Any:
    """The first of these fields that the row has. Raises UserError that names the fields it has."""
    for name in names:
        if task_info.get(name) is not None:
            return task_info[name]
    raise UserError(f"The task has no {names[0]!r}.", f"Its fields are {', '.join(map(str, task_info))}.")


def _task(task_info: Mapping[str, Any], answer: str) -> Task:
    question = str(task_info.get("question", task_info.get("problem", "")))
    return Task(id="task", messages=(Message(role="user", content=question),), answer=answer)
