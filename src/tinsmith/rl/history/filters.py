"""Filters of rollouts, as conditions on the columns of the index."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from tinsmith.rl.history.rows import ROLE_SEPARATOR
from tinsmith.rl.record.layout import Kind

Sort = Literal["step", "reward", "tokens", "turns", "advantage", "task"]
"""Columns to sort by; rollouts with equal values are in the order of their steps and lines."""

Condition = tuple[str, tuple[Any, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFilter:
    """Which rollouts to list; conditions that are not set select all.

    Example: RolloutFilter(kind="train", steps=(10, 20), reward=(0.0, 0.5), search="wait")
    """

    kind: Kind | None = None
    steps: tuple[int | None, int | None] = (None, None)
    """First and last step."""
    task: str = ""
    """Part of the task's name, ignoring case; `task_is` is the whole name."""
    task_is: str = ""
    environment: str = ""
    role: str = ""
    """Role of a trajectory."""
    reward: tuple[float | None, float | None] = (None, None)
    """Smallest and largest reward."""
    group: int | None = None
    """Number of the group in its step."""
    failed: bool | None = None
    cut: bool | None = None
    """Whether a trajectory ended at the limit of tokens."""
    correct: bool | None = None
    search: str = ""
    """Text of the task, of replies, of what was sent between them, or of the error, ignoring case."""

    def selects_file(self, kind: Kind, step: int) -> bool:
        """Whether the file of a step may hold rollouts that the filter selects."""
        first, last = self.steps
        return self.kind in (None, kind) and (first is None or step >= first) and (last is None or step <= last)

    def conditions(self) -> Iterator[Condition]:
        """Conditions in SQL, apart from that of `search`."""
        equal = {"kind": self.kind, "grp": self.group, "failed": self.failed, "cut": self.cut, "correct": self.correct}
        for column, value in equal.items():
            if value is not None:
                yield f"{column} = ?", (value,)
        for column, value in (("task", self.task_is), ("environment", self.environment)):
            if value:
                yield f"{column} = ?", (value,)
        for column, (low, high) in (("step", self.steps), ("reward", self.reward)):
            if low is not None:
                yield f"{column} >= ?", (low,)
            if high is not None:
                yield f"{column} <= ?", (high,)
        if self.task:
            yield "instr(lower(task), lower(?))", (self.task,)
        if self.role:
            yield "instr(roles, ?)", (f"{ROLE_SEPARATOR}{self.role}{ROLE_SEPARATOR}",)
