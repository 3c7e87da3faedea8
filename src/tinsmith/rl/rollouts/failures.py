"""The limit of failed rollouts: a run that mostly fails ends, and says why."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Sequence

from tinsmith.errors import TinsmithError
from tinsmith.plurals import counted
from tinsmith.rl.types import Group

CANCELLED = "cancelled: enough other groups were complete"
"""Error of rollouts that oversampling cancelled; they do not count as failed."""
_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+")
_HINT = "Fix the cause; `tinsmith debug` runs one task. The rollouts of each step are in rollouts/ of the run folder."


class FailureLimit:
    """Counts the failed rollouts of the last batches."""

    def __init__(self, share: float, window: int) -> None:
        """`share`: the largest share of failed rollouts over `window` batches."""
        self._share = share
        self._batches: deque[tuple[int, list[str]]] = deque(maxlen=window)

    def add(self, groups: Sequence[Group]) -> None:
        """Count a batch. Raises TinsmithError if too many rollouts of the last batches failed."""
        self._batches.append((sum(len(group.rollouts) for group in groups), errors_of(groups)))
        total = sum(count for count, _ in self._batches)
        errors = [error for _, failed in self._batches for error in failed]
        full = len(self._batches) == self._batches.maxlen
        if full and self._share < 1 and len(errors) > self._share * total:
            raise TinsmithError(
                f"{len(errors)} of {counted(total, 'rollout')} of the last {counted(len(self._batches), 'batch')} "
                f"failed, more than rollout.max_failures allows ({self._share:g}). {most_frequent(errors)}",
                _HINT,
            )


def errors_of(groups: Sequence[Group]) -> list[str]:
    """The errors of the failed rollouts."""
    errors = (rollout.error for group in groups for rollout in group.rollouts if rollout.error)
    return [error for error in errors if not error.endswith(CANCELLED)]


def most_frequent(errors: Sequence[str]) -> str:
    """A sentence about the most frequent error; errors that differ in numbers alone count as one."""
    if not errors:
        return "All were cancelled."
    kinds = Counter(_NUMBERS.sub("#", error) for error in errors)
    kind, count = kinds.most_common(1)[0]
    example = next(error for error in errors if _NUMBERS.sub("#", error) == kind)
    return f"The most frequent error, {count} of {counted(len(errors), 'time')}: {example}"
