"""What the index of rollouts holds of each: a row, made from its line in rollouts/.

A line is taken as it is found: fields that are missing or of another type are empty in the row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinsmith.rl.record.layout import Kind

_SEARCHED = 3_000
"""Characters of a rollout in the index. Of a longer one, the line in its file is searched."""
_PREVIEW = 240
ROLE_SEPARATOR = "\x1f"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRow:
    """A rollout in a list.

    Example: RolloutRow(kind="train", step=12, line=3, task="gsm8k/17", reward=1.0, ...).id == "train-12-3"
    """

    kind: Kind
    step: int
    line: int
    """Line of its file, from 0."""
    group: int
    """Number of its group in the step, from 0."""
    index: int
    """Number in its group, from 0."""
    version: int
    task: str
    environment: str
    roles: tuple[str, ...]
    reward: float | None
    """None if it is not finite."""
    correct: bool | None
    failed: bool
    cut: bool
    """Whether a trajectory ended at the limit of tokens."""
    termination: str
    turns: int
    tokens: int
    """Sampled tokens."""
    advantage: float | None
    """Mean advantage of the tokens that were trained on; None if there are none."""
    preview: str
    """The begin of the last reply, or of the error, in one line."""

    @property
    def id(self) -> str:
        """The name of the rollout: KIND-STEP-LINE."""
        return f"{self.kind}-{self.step}-{self.line}"


@dataclass(frozen=True, slots=True)
class Page:
    """Some of the rollouts that a filter selects."""

    rows: tuple[RolloutRow, ...]
    total: int
    """Number of rollouts that the filter selects."""
    indexed: int
    """Files of rollouts that were looked at."""
    files: int
    """Files of rollouts of the run; more than `indexed` while the index is being built."""

    @property
    def complete(self) -> bool:
        """Whether all files were looked at."""
        return self.indexed >= self.files


class GroupNumbers:
    """Numbers the groups of a file whose lines do not: a group begins with index 0 or with another task."""

    def __init__(self) -> None:
        self._number, self._task, self._index = -1, None, -1

    def of(self, line: Mapping[str, Any]) -> int:
        """The number of the group of the next line."""
        task, index = line.get("task"), integer(line.get("index"))
        if self._number < 0 or task != self._task or index <= self._index:
            self._number += 1
        self._task, self._index = task, index
        return integer(line["group"]) if isinstance(line.get("group"), int) else self._number


def values_of(line: Mapping[str, Any], group: int) -> tuple[Any, ...]:
    """The columns of the index for a rollout after (kind, step, line, offset, length), in the order of `COLUMNS`."""
    trajectories = records(line.get("trajectories"))
    turns = [turn for each in trajectories for turn in records(each.get("turns"))]
    error, texts = text(line.get("error")), list(_texts(line, trajectories))
    joined = "\n".join(texts).casefold()
    tokens = sum(len(items(turn.get("tokens"))) for turn in turns if not turn.get("model"))
    roles = dict.fromkeys(text(each.get("role")) for each in trajectories)
    correct = line.get("correct")
    return (
        group,
        integer(line.get("index")),
        integer(line.get("version")),
        text(line.get("task")),
        text(line.get("environment")),
        f"{ROLE_SEPARATOR}{ROLE_SEPARATOR.join(roles)}{ROLE_SEPARATOR}",
        finite(line.get("reward")),
        int(correct) if isinstance(correct, bool) else None,
        int(bool(error)),
        int(any(turn.get("stop") == "length" for each in trajectories for turn in records(each.get("turns"))[-1:])),
        text(line.get("termination")),
        len(turns),
        tokens,
        mean_advantage(turns),
        " ".join((error or text(line.get("text")))[: 4 * _PREVIEW].split())[:_PREVIEW],
        joined[:_SEARCHED],
        int(len(joined) <= _SEARCHED),
    )


def searched_text(line: Mapping[str, Any]) -> str:
    """All text of a rollout that a search looks at, case folded."""
    return "\n".join(_texts(line, records(line.get("trajectories")))).casefold()


def _texts(line: Mapping[str, Any], trajectories: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield text(line.get("task"))
    yield text(line.get("error"))
    yield from (text(turn.get("text")) for each in trajectories for turn in records(each.get("turns")))
    if not trajectories:
        yield text(line.get("text"))
    yield text(line.get("answer"))
    yield from (text(message.get("content")) for message in records(line.get("messages")))
    for each in trajectories:  # what was sent between the turns, such as results of tools
        yield from (text(turn.get("input")) for turn in records(each.get("turns"))[1:])


def mean_advantage(turns: Sequence[Mapping[str, Any]]) -> float | None:
    """Mean advantage of the tokens of turns; None if none was trained on."""
    total, count = 0.0, 0
    for turn in turns:
        advantages = turn.get("advantages")
        if isinstance(advantages, list | tuple):
            numbers = [value for value in advantages if finite(value) is not None]
            total, count = total + sum(numbers), count + len(numbers)
        elif finite(advantages) is not None:
            length = max(1, len(items(turn.get("tokens"))))
            total, count = total + float(advantages or 0.0) * length, count + length
    return total / count if count else None


def text(value: Any) -> str:
    """The value if it is text, else an empty one."""
    return value if isinstance(value, str) else ""


def integer(value: Any) -> int:
    """The value if it is an integer of 64 bits, else 0."""
    return value if isinstance(value, int) and abs(value) < 2**63 else 0


def finite(value: Any) -> float | None:
    """The value if it is a finite number, else None."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < 1e300 and math.isfinite(value) else None


def items(value: Any) -> Sequence[Any]:
    """The value if it is a list, or the tuple that a list is written from; else an empty one."""
    return value if isinstance(value, list | tuple) else ()


def records(value: Any) -> list[Mapping[str, Any]]:
    """The objects in a list; none if it is no list."""
    return [each for each in items(value) if isinstance(each, dict)]
