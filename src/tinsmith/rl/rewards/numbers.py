"""Rewards for answers that are one number."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Literal

from tinsmith.rl.rewards.base import Reward
from tinsmith.rl.types import Task

_NUMBER = r"(?:(?<!\d)[-+])?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)"
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
MARK = "####"
"""What GSM8K puts before an answer."""


class Number(Reward):
    """1 where the number of the reply equals the number of the answer, else 0."""

    type: Literal["number"] = "number"
    where: Literal["reply", "last", "boxed", "marked"] = "last"
    """The number is the whole reply, the last one in it, the last inside \\boxed{}, or what follows the last ####."""

    def score(self, task: Task, text: str) -> float:
        """Compares as decimals: 1,000 is 1000.0."""
        return float((number := _number(text, self.where)) is not None and number == _right(task))


class Closeness(Reward):
    """1 for exactly the number; for another bare integer 0.5 x (1 - relative error), not below 0; else 0."""

    type: Literal["closeness"] = "closeness"

    def score(self, task: Task, text: str) -> float:
        """The ramp gives a signal before the first exact answer; the gap to 1 keeps exactness worth most."""
        right = _right(task)
        number = _number(text, "reply")
        if number is None:
            return 0.0
        if number == right:
            return 1.0
        if number != number.to_integral_value():
            return 0.0
        return 0.5 * max(0.0, 1.0 - float(abs(number - right) / max(abs(right), Decimal(1))))


class Marked(Reward):
    """1 where the reply ends with `#### N`, N a number, and has the mark only there; else 0."""

    type: Literal["marked"] = "marked"

    def score(self, task: Task, text: str) -> float:
        """Strict, since a policy finds out that '#### 10 #### 10' is worth as much where it is."""
        before, mark, after = text.strip().partition(MARK)
        at_a_line = not before or before.endswith("\n")
        return float(bool(mark) and at_a_line and re.fullmatch(rf" ?{_NUMBER}", after, re.ASCII) is not None)


def _number(text: str, where: str) -> Decimal | None:
    if where == "boxed":
        boxed = _BOXED.findall(text)
        return _number(boxed[-1], "last") if boxed else None
    if where == "marked":
        _, mark, after = text.rpartition(MARK)
        return _number(after, "reply") if mark else None
    if where == "reply":
        found = re.fullmatch(_NUMBER, text.strip(), re.ASCII)
        return Decimal(found[0].replace(",", "")) if found else None
    numbers = re.findall(_NUMBER, text, re.ASCII)
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


def _right(task: Task) -> Decimal:
    number = _number(task.answer, "last")
    if number is None:
        raise ValueError(f"the answer {task.answer!r} of {task.id} is no number; use another reward")
    return number
