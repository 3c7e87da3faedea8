"""Rewards for mathematics, compared by the package math-verify."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from typing_extensions import override

from tinsmith.rl.rewards.base import Score
from tinsmith.rl.rewards.compared import ComparedReward, Comparison
from tinsmith.rl.rewards.format import THINK_ANSWER, matches
from tinsmith.rl.rewards.numbers import MARK
from tinsmith.rl.rewards.tags import last_tagged
from tinsmith.rl.types import Task
from tinsmith.settings import Needs

Verdict = Literal["equal", "different", "unreadable"]
"""Of a comparison; `unreadable` if math-verify cannot read the task's answer."""


class MathVerify(ComparedReward):
    """1 if the package math-verify finds reply and answer mathematically equal, else 0.

    The task's answer is the bare answer, or a whole solution that ends with #### and the answer.
    """

    wrong: ClassVar[Verdict] = "different"
    type: Literal["math_verify"] = "math_verify"

    @override
    def comparison(self, task: Task, text: str) -> Comparison:
        return _with_answer(task, text)

    @override
    def grade(self, task: Task, text: str, result: Verdict) -> Score:
        right = _is_right(task, result)
        return Score(value=float(right), correct=right)


class Math(ComparedReward):
    """Accuracy (1 or 0, by math-verify), plus `form` if the reply has the required format, else minus `form`.

    The text of the last <answer>…</answer> is compared, or the whole reply if it has none. The reply is right if its
    accuracy is 1, whatever its format.
    """

    wrong: ClassVar[Verdict] = "different"
    type: Literal["math"] = "math"
    pattern: str = THINK_ANSWER
    """Required format: a regular expression that the whole reply must match."""
    form: float = 0.1
    """Reward for the format; it is subtracted if the format is wrong."""

    @override
    def comparison(self, task: Task, text: str) -> Comparison:
        answer = last_tagged(text, "answer")
        return _with_answer(task, text if answer is None else answer)

    @override
    def grade(self, task: Task, text: str, result: Verdict) -> Score:
        """The parts are `accuracy` and `format`; by default their sum is -0.1, 0.1, 0.9 or 1.1."""
        return _in_parts(_is_right(task, result), self.form if matches(self.pattern, text) else -self.form)


class MathBoxed(ComparedReward):
    """1 if the content of the last \\boxed{} equals the answer, else 0; minus `form` if `think` is set and violated.

    The reply is right if the content is, whatever its format.
    """

    wrong: ClassVar[Verdict] = "different"
    type: Literal["math_boxed"] = "math_boxed"
    think: bool = False
    """Require exactly one <think>, followed by exactly one </think>."""
    form: Annotated[float, Needs("think", (True,))] = 0.1
    """Penalty for a reply that violates `think`."""

    @override
    def comparison(self, task: Task, text: str) -> Comparison | None:
        content = boxed(text)
        return None if content is None else _with_answer(task, f"\\boxed{{{content}}}")

    @override
    def grade(self, task: Task, text: str, result: Verdict) -> Score:
        thought = text.count("<think>") == text.count("</think>") == 1 and text.find("<think>") < text.find("</think>")
        return _in_parts(_is_right(task, result), -self.form if self.think and not thought else 0.0)


def boxed(text: str) -> str | None:
    """Return the content of the last \\boxed{}, which may contain braces; None without a complete \\boxed{}."""
    begin = text.rfind("\\boxed{")
    if begin < 0:
        return None
    begin += len("\\boxed{")
    depth = 1
    for index in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return text[begin:index].strip()
    return None


def _with_answer(task: Task, text: str) -> Comparison:
    """Compare a text with the task's answer, which may be bare, boxed or at the end of a solution."""
    answer = task.answer.rpartition(MARK)[2].strip()
    content = boxed(answer)
    return Comparison("tinsmith.rl.scoring.mathematics:compare", (answer if content is None else content, text))


def _is_right(task: Task, verdict: Verdict) -> bool:
    """Raise ValueError if math-verify cannot read the task's answer."""
    if verdict == "unreadable":
        raise ValueError(f"math-verify cannot read the answer {task.answer!r} of {task.id}")
    return verdict == "equal"


def _in_parts(right: bool, form: float) -> Score:
    parts = {"accuracy": float(right), "format": form}
    return Score(value=sum(parts.values()), correct=right, parts=parts)
