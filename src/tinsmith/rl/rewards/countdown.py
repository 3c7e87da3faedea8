"""The reward of the number game Countdown: reach a target from given numbers with + - * / and parentheses."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Literal

from typing_extensions import override

from tinsmith.rl.rewards.base import Reward, Score
from tinsmith.rl.scoring.arithmetic import evaluate, without_delimiters
from tinsmith.rl.scoring.replies import boxed, last_box, last_tagged, spoken
from tinsmith.rl.types import Task


class Countdown(Reward):
    """1 if the expression in the last <answer> uses each number exactly once and equals the target; `partial` for any
    other answer; 0 without <answer>…</answer> after the thoughts.

    The expression has + - * / and parentheses, and may be boxed; values are exact. Of an equation such as
    `44 + 19 + 35 = 98`, the first side is the expression, and every other side must equal the target too.

    The task's answer is JSON: {"target": 24, "numbers": [1, 2, 3, 4]}.
    """

    type: Literal["countdown"] = "countdown"
    partial: float = 0.1
    """Reward of a wrong answer in <answer>…</answer>."""

    @property
    @override
    def says_correct(self) -> bool:
        return True

    @override
    def score(self, task: Task, text: str) -> Score:
        target, numbers = _target_and_numbers(task)
        answer = last_tagged(spoken(text), "answer", ignore_case=True)
        if answer is None:
            return Score(value=0.0, correct=False)
        if last_box(answer) is not None:
            answer = boxed(answer) or ""
        right = reaches(answer, target, numbers)
        return Score(value=1.0 if right else self.partial, correct=right)


def reaches(answer: str, target: Fraction, numbers: list[Fraction]) -> bool:
    """Whether `answer` is an expression, or equation, of exactly these numbers with the value `target`."""
    sides = [evaluate(side) for side in without_delimiters(answer.strip()).split("=", 2)]
    if any(side is None or side.value != target for side in sides):
        return False
    return sides[0] is not None and sorted(sides[0].numbers) == sorted(numbers)


def _target_and_numbers(task: Task) -> tuple[Fraction, list[Fraction]]:
    """Raise ValueError for a task whose answer has no target or no numbers."""
    try:
        answer = json.loads(task.answer)
        numbers = answer["numbers"] if "numbers" in answer else answer["nums"]
        return Fraction(str(answer["target"])), [Fraction(str(number)) for number in numbers]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"the answer {task.answer!r} of {task.id} has no target and numbers") from error
