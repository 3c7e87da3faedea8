"""What an answer is worth. Each reward is a settings class whose `score` reads a task and the reply to it.

A run lists its rewards; the reward of a rollout is their weighted sum, and each part is kept by name. A score that
raises makes the rollout a failed one, with the reason; it never stops a run.

Example: Closeness().score(task_with_answer_52, "50") == 0.5 * (1 - 2 / 52)
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from decimal import Decimal
from typing import Annotated, Any, Literal, cast

from pydantic import Field

from tinsmith.errors import ConfigError
from tinsmith.rl.types import Task
from tinsmith.settings import Settings

_NUMBER = r"(?:(?<!\d)[-+])?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)"
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")


class Reward(Settings):
    """What every reward has."""

    weight: float = 1.0
    """Its share of the rollout's reward."""
    name: str = ""
    """Its name in reward parts and metrics; the type if empty."""


class Number(Reward):
    """1 where the number of the reply equals the number of the answer, else 0."""

    type: Literal["number"] = "number"
    where: Literal["reply", "last", "boxed"] = "last"
    """The number is the whole reply, the last one in it, or the last inside \\boxed{}."""

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


class MathVerify(Reward):
    """1 where the math-verify package finds reply and answer equal as mathematics, else 0."""

    type: Literal["math_verify"] = "math_verify"
    timeout: int = Field(default=5, ge=1)
    """Seconds for one comparison."""

    def score(self, task: Task, text: str) -> float:
        """Timeouts need the main thread, where a run has its loop; elsewhere there are none."""
        import math_verify

        parse = cast(Any, math_verify.parse)
        verify = cast(Any, math_verify.verify)  # decorated: its type says that it takes nothing
        timeout = self.timeout if threading.current_thread() is threading.main_thread() else None
        right = parse(f"${task.answer}$", parsing_timeout=timeout) or parse(task.answer, parsing_timeout=timeout)
        if not right:
            raise ValueError(f"math-verify cannot read the answer {task.answer!r} of {task.id}")
        return float(verify(right, parse(text, parsing_timeout=timeout), timeout_seconds=timeout))


class Format(Reward):
    """1 where the whole reply matches a pattern, else 0."""

    type: Literal["format"] = "format"
    pattern: str
    """A regular expression; a dot matches line ends too."""

    def score(self, task: Task, text: str) -> float:
        """White space around the reply does not count."""
        return float(re.fullmatch(self.pattern, text.strip(), re.DOTALL) is not None)


class ReasoningGymScore(Reward):
    """The dataset's own score of the reply, 0 to 1; for tasks of the source `reasoning_gym`."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    tag: str = ""
    """Score only what stands between <tag> and </tag>, if set; nothing there scores 0."""

    def score(self, task: Task, text: str) -> float:
        """Raises ValueError for a task of another source."""
        from reasoning_gym import get_score_answer_fn

        dataset = task.extra.get("metadata", {}).get("source_dataset")
        if not dataset:
            raise ValueError(f"{task.id} is no task of reasoning-gym; use another reward")
        answer = text.strip()
        if self.tag:
            found = re.findall(rf"<{self.tag}>(.*?)</{self.tag}>", text, re.DOTALL)
            answer = found[-1].strip() if found else ""
        scorer = cast(Any, get_score_answer_fn(dataset))  # its type is that of an unbound method
        return float(scorer(answer, dict(task.extra))) if answer else 0.0


RewardConfig = Annotated[
    Number | Closeness | MathVerify | Format | ReasoningGymScore,
    Field(discriminator="type"),
]


class Rewards:
    """The rewards of a run under their names."""

    def __init__(self, configs: Sequence[RewardConfig]) -> None:
        self._parts = {config.name or config.type: config for config in configs}
        if not configs or len(self._parts) < len(configs):
            raise ConfigError("rewards: each needs a name of its own, and there must be one.", "Set name: on them.")
        for config in configs:
            if isinstance(config, Format):
                _check_pattern(config.pattern)

    def score(self, task: Task, text: str) -> tuple[float, dict[str, float]]:
        """The weighted sum and its parts before weighting."""
        parts = {name: config.score(task, text) for name, config in self._parts.items()}
        return sum(self._parts[name].weight * value for name, value in parts.items()), parts


def _check_pattern(pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"rewards: the pattern {pattern!r} is not one: {error}.", "Mend the expression.") from error


def _number(text: str, where: str) -> Decimal | None:
    if where == "boxed":
        boxed = _BOXED.findall(text)
        return _number(boxed[-1], "last") if boxed else None
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
