"""Rewards for answers that are a single number."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Literal

from typing_extensions import override

from tinsmith.rl.rewards.base import Reward, Score
from tinsmith.rl.types import Task

_NUMBER = r"(?:(?<!\d)[-+−])?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+−]?\d+)?"
_MAX_EXPONENT_DIGITS = 4
"""Numbers with a longer exponent are not read."""
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
MARK = "####"
"""The mark before the final answer in GSM8K."""


class Number(Reward):
    """1 if the number in the reply equals the last number in the answer, else 0.

    As decimals: 1,000 equals 1000.0 and 1e3. Both - and − (U+2212) are minus signs.
    """

    type: Literal["number"] = "number"
    where: Literal["reply", "last", "boxed", "marked"] = "last"
    """Number to compare: `reply`, the whole reply; `last`, the last number in it; `boxed`, the last number in the last
    \\boxed{}; `marked`, the text after the last ####."""

    @property
    @override
    def says_correct(self) -> bool:
        return True

    @override
    def score(self, task: Task, text: str) -> Score:
        right = (number := _number(text, self.where)) is not None and number == _right(task)
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
    def score(self, task: Task, text: str) -> Score:
        right = _right(task)
        number = _number(text, "reply")
        if number is not None and number == right:
            return Score(value=1.0, correct=True)
        if number is None or number != number.to_integral_value():
            return Score(value=0.0, correct=False)
        error = float(abs(number - right) / max(abs(right), Decimal(1)))
        return Score(value=0.5 * max(0.0, 1.0 - error), correct=False)


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


def _number(text: str, where: str) -> Decimal | None:
    if where == "boxed":
        boxed = _BOXED.findall(text)
        return _number(boxed[-1], "last") if boxed else None
    if where == "marked":
        _, mark, after = text.rpartition(MARK)
        return _number(after, "reply") if mark else None
    if where == "reply":
        match = re.fullmatch(_NUMBER, text.strip(), re.ASCII)
        return _decimal(match[0]) if match else None
    numbers = re.findall(_NUMBER, text, re.ASCII)
    return _decimal(numbers[-1]) if numbers else None


def _decimal(number: str) -> Decimal | None:
    number = number.replace(",", "").replace("−", "-").lower()
    exponent = number.partition("e")[2].lstrip("+-0")
    return Decimal(number) if len(exponent) <= _MAX_EXPONENT_DIGITS else None


def _right(task: Task) -> Decimal:
    number = _number(task.answer, "last")
    if number is None:
        raise ValueError(f"the answer {task.answer!r} of {task.id} is not a number; use another reward")
    return number
