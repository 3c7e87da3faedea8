"""Rewards for mathematics, compared by the package math-verify, and for the numbers game Countdown."""

from __future__ import annotations

import ast
import json
import operator
import re
import threading
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import Field

from tinsmith.rl.rewards.base import Reward
from tinsmith.rl.rewards.format import THINK_ANSWER
from tinsmith.rl.rewards.numbers import MARK
from tinsmith.rl.types import Task
from tinsmith.settings import Needs

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_OPERATORS: Mapping[type, Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class MathVerify(Reward):
    """1 where the math-verify package finds reply and answer equal as mathematics, else 0."""

    type: Literal["math_verify"] = "math_verify"
    timeout: int = Field(default=5, ge=1)
    """Seconds for one comparison."""

    def score(self, task: Task, text: str) -> float:
        """The answer may be bare, or a whole solution that ends in #### and the answer."""
        return equal(task, text, self.timeout)


class Math(Reward):
    """Accuracy (1 or 0, by math-verify) plus 0.1 for the form, or less 0.1 without it.

    Of a reply with <answer>…</answer>, the last such answer is compared; of any other the whole text.
    """

    type: Literal["math"] = "math"
    pattern: str = THINK_ANSWER
    """The form: a regular expression that the whole reply matches."""
    form: float = 0.1
    """What the form is worth: added with it, taken off without."""
    timeout: int = Field(default=5, ge=1)
    """Seconds for one comparison."""

    def score(self, task: Task, text: str) -> dict[str, float]:
        """-0.1, 0.1, 0.9 or 1.1, as `accuracy` and `format`."""
        in_form = re.fullmatch(self.pattern, text.strip(), re.DOTALL)
        answers = _ANSWER.findall(text)
        right = equal(task, answers[-1].strip() if answers else text, self.timeout)
        return {"accuracy": right, "format": self.form if in_form else -self.form}


class MathBoxed(Reward):
    """1 where what stands in the last \\boxed{} equals the answer, else 0; with `think`, less 0.1 without <think>."""

    type: Literal["math_boxed"] = "math_boxed"
    think: bool = False
    """Want exactly one <think> before exactly one </think>."""
    form: Annotated[float, Needs("think", (True,))] = 0.1
    """What is taken off where `think` finds none."""
    timeout: int = Field(default=5, ge=1)
    """Seconds for one comparison."""

    def score(self, task: Task, text: str) -> dict[str, float]:
        """As `accuracy` and `format`."""
        inside = boxed(text)
        right = 0.0 if inside is None else equal(task, f"\\boxed{{{inside}}}", self.timeout)
        thought = text.count("<think>") == text.count("</think>") == 1 and text.find("<think>") < text.find("</think>")
        return {"accuracy": right, "format": -self.form if self.think and not thought else 0.0}


class Countdown(Reward):
    """1 where the equation in the last <answer> uses each number once and makes the target; 0.1 for another; else 0.

    The task's answer is JSON: {"target": 24, "numbers": [1, 2, 3, 4]}.
    """

    type: Literal["countdown"] = "countdown"

    def score(self, task: Task, text: str) -> float:
        """Raises ValueError for a task that has no target and numbers."""
        target, numbers = _wanted(task)
        answers = _ANSWER.findall(text)
        if not answers:
            return 0.0
        try:
            used: list[float] = []
            value = _value(ast.parse(answers[-1].partition("=")[0].strip(), mode="eval").body, used)
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, OverflowError, MemoryError):
            return 0.1
        return 1.0 if sorted(used) == sorted(numbers) and abs(value - target) < 1e-5 else 0.1


def equal(task: Task, text: str, timeout: int) -> float:
    """1 where math-verify finds them equal, else 0. Raises ValueError for an answer that it cannot read.

    Timeouts need the main thread, where a run has its loop; elsewhere there are none.
    """
    import math_verify

    parse = cast(Any, math_verify.parse)
    verify = cast(Any, math_verify.verify)  # decorated: its type says that it takes nothing
    seconds = timeout if threading.current_thread() is threading.main_thread() else None
    answer = task.answer.rpartition(MARK)[2].strip()
    answer = inside if (inside := boxed(answer)) is not None else answer
    right = parse(f"${answer}$", parsing_timeout=seconds) or parse(answer, parsing_timeout=seconds)
    if not right:
        raise ValueError(f"math-verify cannot read the answer {task.answer!r} of {task.id}")
    return float(verify(right, parse(text, parsing_timeout=seconds), timeout_seconds=seconds))


def boxed(text: str) -> str | None:
    """What stands between the braces of the last \\boxed, which may hold braces; None where there is none."""
    begin = text.rfind("\\boxed{")
    if begin < 0:
        return None
    begin += len("\\boxed{")
    depth = 1
    for at in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[begin:at].strip()
    return None


def _wanted(task: Task) -> tuple[float, list[float]]:
    try:
        wanted = json.loads(task.answer)
        numbers = wanted["numbers"] if "numbers" in wanted else wanted["nums"]
        return float(wanted["target"]), [float(number) for number in numbers]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"the answer {task.answer!r} of {task.id} has no target and numbers") from error


def _value(node: ast.expr, used: list[float]) -> float:
    """Of numbers, + - * / and parentheses; the numbers go into `used`. Raises ValueError for anything else."""
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            used.append(float(number))
            return float(number)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left, used), _value(right, used))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, used)
        case _:
            raise ValueError("not arithmetic")
