"""Rewards for mathematics, compared by the package math-verify."""

from __future__ import annotations

import re
import threading
from typing import Annotated, Any, Literal, cast

from pydantic import Field
from typing_extensions import override

from tinsmith.rl.rewards.base import Reward
from tinsmith.rl.rewards.format import THINK_ANSWER
from tinsmith.rl.rewards.numbers import MARK
from tinsmith.rl.rewards.tags import last_tagged
from tinsmith.rl.types import Task
from tinsmith.settings import Needs


class MathVerify(Reward):
    """1 if the package math-verify finds reply and answer mathematically equal, else 0.

    The task's answer is the bare answer, or a whole solution that ends with #### and the answer.
    """

    type: Literal["math_verify"] = "math_verify"
    timeout: int = Field(default=5, ge=1)
    """Time limit of a comparison, in seconds."""

    @override
    def score(self, task: Task, text: str) -> float:
        return equal(task, text, self.timeout)


class Math(Reward):
    """Accuracy (1 or 0, by math-verify), plus `form` if the reply has the required format, else minus `form`.

    The text of the last <answer>…</answer> is compared, or the whole reply if it has none.
    """

    type: Literal["math"] = "math"
    pattern: str = THINK_ANSWER
    """Required format: a regular expression that the whole reply must match."""
    form: float = 0.1
    """Reward for the format; it is subtracted if the format is wrong."""
    timeout: int = Field(default=5, ge=1)
    """Time limit of a comparison, in seconds."""

    @override
    def score(self, task: Task, text: str) -> dict[str, float]:
        """Return the parts `accuracy` and `format`; by default their sum is -0.1, 0.1, 0.9 or 1.1."""
        has_format = re.fullmatch(self.pattern, text.strip(), re.DOTALL)
        answer = last_tagged(text, "answer")
        right = equal(task, text if answer is None else answer, self.timeout)
        return {"accuracy": right, "format": self.form if has_format else -self.form}


class MathBoxed(Reward):
    """1 if the content of the last \\boxed{} equals the answer, else 0; minus `form` if `think` is set and violated."""

    type: Literal["math_boxed"] = "math_boxed"
    think: bool = False
    """Require exactly one <think>, followed by exactly one </think>."""
    form: Annotated[float, Needs("think", (True,))] = 0.1
    """Penalty for a reply that violates `think`."""
    timeout: int = Field(default=5, ge=1)
    """Time limit of a comparison, in seconds."""

    @override
    def score(self, task: Task, text: str) -> dict[str, float]:
        """Return the parts `accuracy` and `format`."""
        content = boxed(text)
        right = 0.0 if content is None else equal(task, f"\\boxed{{{content}}}", self.timeout)
        thought = text.count("<think>") == text.count("</think>") == 1 and text.find("<think>") < text.find("</think>")
        return {"accuracy": right, "format": -self.form if self.think and not thought else 0.0}


def equal(task: Task, text: str, timeout: int) -> float:
    """Return 1 if math-verify finds the text equal to the task's answer, else 0.

    Raises ValueError if math-verify cannot read the answer. The timeout works in the main thread only, where the event
    loop of a run is; in other threads there is none.
    """
    import math_verify

    parse = cast(Any, math_verify.parse)
    verify = cast(Any, math_verify.verify)  # its decorator hides the parameters from the type checker
    seconds = timeout if threading.current_thread() is threading.main_thread() else None
    answer = task.answer.rpartition(MARK)[2].strip()
    answer = content if (content := boxed(answer)) is not None else answer
    right = parse(f"${answer}$", parsing_timeout=seconds) or parse(answer, parsing_timeout=seconds)
    if not right:
        raise ValueError(f"math-verify cannot read the answer {task.answer!r} of {task.id}")
    return float(verify(right, parse(text, parsing_timeout=seconds), timeout_seconds=seconds))


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
