"""Rewards for answers that are a single number."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Literal

from typing_extensions import override

from tinsmith.rl.rewards.base import Reward, Score
from tinsmith.rl.scoring.notation import normalized
from tinsmith.rl.scoring.quantities import Quantity, equal, quantity, readings
from tinsmith.rl.scoring.replies import MARK, boxed, last_number, right_answer, spoken
from tinsmith.rl.types import Task

_NUMBER = r"(?:(?<!\d)[-+−])?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+−]?\d+)?"


class Number(Reward):
    """1 if the number in the reply equals the answer, or the last number in it, else 0.

    Numbers are exact: 1,000 equals 1000.0 and 1e3, and 1/2 equals 0.5 and \\frac{1}{2}. Units are dropped. Thoughts in
    <think>…</think> are not read.
    """

    type: Literal["number"] = "number"
    where: Literal["reply", "last", "boxed", "marked"] = "last"
    """Number to compare: `reply`, the whole reply, without words; `last`, the last number in it; `boxed`, the content
    of the last \\boxed{}; `marked`, the text after the last ####. Box and text must be one number."""

    @property
    @override
    def says_correct(self) -> bool:
        return True

    @override
    def read_answer(self, task: Task, text: str) -> str:
        numbers = _numbers(spoken(text), self.where)
        return str(numbers[0].value) if numbers else ""

    @override
    def score(self, task: Task, text: str) -> Score:
        expected = _right(task)
        right = any(equal(expected, number) for number in _numbers(spoken(text), self.where))
        return Score(value=float(right), correct=right)


class Closeness(Reward):
    """1 for the exact number; 0.5 x (1 - relative error), at least 0, for another integer; 0 for any other reply.

    The reply must be the bare number; it is right if it is exact. The partial reward is a signal before the policy
    finds a first exact answer.
    """

    type: Literal["closeness"] = "closeness"

    @property
    @override
    def says_correct(self) -> bool:
        return True

    @override
    def read_answer(self, task: Task, text: str) -> str:
        number = _bare(spoken(text))
        return "" if number is None else str(number.value)

    @override
    def score(self, task: Task, text: str) -> Score:
        right, number = _right(task).value, _bare(spoken(text))
        if number is not None and number.value == right:
            return Score(value=1.0, correct=True)
        if number is None or number.value.denominator != 1:
            return Score(value=0.0, correct=False)
        error = abs(number.value - right) / max(abs(right), Fraction(1))
        return Score(value=0.5 * float(max(Fraction(0), 1 - error)), correct=False)


class Marked(Reward):
    """1 if the reply ends with a line `#### N`, N a number, and has no other ####; else 0.

    The single mark matters: a policy soon learns to write `#### 10 #### 10` if that is rewarded too.
    """

    type: Literal["marked"] = "marked"

    @override
    def score(self, task: Task, text: str) -> float:
        before, mark, after = text.strip().partition(MARK)
        begins_line = not before or before.endswith("\n")
        return float(bool(mark) and begins_line and re.fullmatch(rf" ?{_NUMBER}", after, re.ASCII) is not None)


def _numbers(text: str, where: str) -> list[Quantity]:
    """The number of a reply; with its approximation if it gives one too, and empty if it has none."""
    if where == "last":
        number = last_number(text)
        return [] if number is None else [number]
    if where == "reply":
        number = _bare(text)
        return [] if number is None else [number]
    content = boxed(text) if where == "boxed" else _after_mark(text)
    numbers = [quantity(reading) for reading in readings(normalized(content or ""))]
    return [number for number in numbers if number is not None]


def _after_mark(text: str) -> str | None:
    _, mark, after = text.rpartition(MARK)
    return after if mark else None


def _bare(text: str) -> Quantity | None:
    return quantity(normalized(text)) if re.fullmatch(_NUMBER, text.strip(), re.ASCII) else None


def _right(task: Task) -> Quantity:
    answer = right_answer(task.answer)
    number = quantity(normalized(answer)) or last_number(answer)
    if number is None:
        raise ValueError(f"the answer {task.answer!r} of {task.id} is not a number; use another reward")
    return number
