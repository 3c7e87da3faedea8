"""Rewards for mathematics, compared by `tinsmith.rl.scoring.mathematics`."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from typing_extensions import override

from tinsmith.rl.rewards.base import Score
from tinsmith.rl.rewards.compared import ComparedReward, Comparison
from tinsmith.rl.rewards.format import THINK_ANSWER, matches
from tinsmith.rl.scoring.replies import answer_text, boxed, right_answer, spoken
from tinsmith.rl.types import Task
from tinsmith.settings import Needs

Verdict = Literal["equal", "different", "unreadable"]
"""Of a comparison; `unreadable` if the task has no answer to compare with."""


class MathVerify(ComparedReward):
    """1 if the answer that the reply states is mathematically equal to the right one, else 0.

    The reply states it in the last <answer>…</answer>, else in the last \\boxed{}, else after ####, else in prose. The
    task's answer is bare, boxed, or the end of a whole solution after ####.
    """

    wrong: ClassVar[Verdict] = "different"
    type: Literal["math_verify"] = "math_verify"

    @override
    def comparison(self, task: Task, text: str) -> Comparison | None:
        return _comparison(task, answer_text(text))

    @override
    def grade(self, task: Task, text: str, result: Verdict) -> Score:
        right = _is_right(task, result)
        return Score(value=float(right), correct=right)


class Math(ComparedReward):
    """Accuracy (1 or 0, as `math_verify`), plus `form` if the reply has the required format, else minus `form`.

    The reply is right if its accuracy is 1, whatever its format.
    """

    wrong: ClassVar[Verdict] = "different"
    type: Literal["math"] = "math"
    pattern: str = THINK_ANSWER
    """Required format: a regular expression that the whole reply must match."""
    form: float = 0.1
    """Reward for the format; it is subtracted if the format is wrong."""

    @override
    def comparison(self, task: Task, text: str) -> Comparison | None:
        return _comparison(task, answer_text(text))

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
        return _comparison(task, boxed(spoken(text)))

    @override
    def grade(self, task: Task, text: str, result: Verdict) -> Score:
        thought = text.count("<think>") == text.count("</think>") == 1 and text.find("<think>") < text.find("</think>")
        return _in_parts(_is_right(task, result), -self.form if self.think and not thought else 0.0)


def _comparison(task: Task, text: str | None) -> Comparison | None:
    """The comparison of a text with the task's answer; None without text. Raises ValueError without an answer."""
    answer = right_answer(task.answer)
    if not answer:
        _is_right(task, "unreadable")
    return Comparison("tinsmith.rl.scoring.mathematics:compare", (answer, text)) if text else None


def _is_right(task: Task, verdict: Verdict) -> bool:
    """Raise ValueError if the task has no answer to compare with."""
    if verdict == "unreadable":
        raise ValueError(f"math-verify cannot read the answer {task.answer!r} of {task.id}")
    return verdict == "equal"


def _in_parts(right: bool, form: float) -> Score:
    parts = {"accuracy": float(right), "format": form}
    return Score(value=sum(parts.values()), correct=right, parts=parts)
