"""Successive halving: at some steps of a sweep, the worse settings end and the others go on.

A decision is a function of the metrics alone: it waits until every setting has reached the step, ranks settings by the
mean over their seeds, and ends all runs of a setting together. So a sweep that is killed decides as it would have, and
which run is fast does not matter; both differ where each run is judged as it arrives.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tinsmith.errors import ConfigError

Curve = Sequence[tuple[int, float]]
"""Steps with the metric's value there, in order."""


@dataclass(frozen=True, slots=True)
class Progress:
    """A run as far as it has come.

    Example: Progress([(10, 0.2), (20, 0.4)], ended=False)
    """

    curve: Curve
    ended: bool
    """Whether it goes no further: it is finished, or has failed."""
    failed: bool = False

    def reached(self, step: int) -> bool:
        """Whether its value at `step` is known, or it will have none."""
        return self.ended or any(at >= step for at, _ in self.curve)

    def value_at(self, step: int) -> float:
        """The first value from `step` on, else the last one; NaN if the run failed or has none."""
        later = [value for at, value in self.curve if at >= step]
        return math.nan if self.failed or not self.curve else later[0] if later else self.curve[-1][1]


def steps_of_halving(settings: int, share: int, steps: int, every: int) -> list[int]:
    """The steps after which all but 1 of `share` settings end, in order, for runs of `steps` steps whose metric is
    measured `every` steps. Raises ConfigError if there is none."""
    if settings < 2:
        raise ConfigError("--halve compares settings, and all runs of this sweep have the same but for their seeds.")
    count = max(1, int(math.log(settings) / math.log(share) + 1e-9))
    at = [math.ceil(steps / share**number) for number in range(count, 0, -1)]
    rounded = sorted({math.ceil(step / every) * every for step in at} if every else set())
    if inside := [step for step in rounded if step < steps]:
        return inside
    measured = f"is measured every {every} of {steps} steps" if every else "is not measured during the runs"
    raise ConfigError(f"--halve: the metric {measured}, so no run could end early by it.", "Set eval.every lower.")


def kept_settings(
    runs: Mapping[str, Sequence[Progress]], step: int, share: int, *, lower: bool = False
) -> list[str] | None:
    """The settings that go on after `step`, best first, of those in `runs`; None before all have reached it.

    1 of `share` is kept, rounded up. A setting counts by the mean over its runs that did not fail; one without such
    a run, or whose mean is no number, is the worst.
    """
    if not all(run.reached(step) for of_setting in runs.values() for run in of_setting):
        return None
    values = {
        name: mean([run.value_at(step) for run in of_setting if not run.failed]) for name, of_setting in runs.items()
    }
    return ranked(values, lower=lower)[: math.ceil(len(values) / share)]


def mean(values: Sequence[float]) -> float:
    """The mean; NaN of no values, and if one is NaN."""
    return sum(values) / len(values) if values else math.nan


def ranked(values: Mapping[str, float], *, lower: bool = False) -> list[str]:
    """The names, best first; those whose value is NaN last, and equal ones in their order."""
    sign = 1.0 if lower else -1.0
    numbers = [name for name in values if not math.isnan(values[name])]
    return [*sorted(numbers, key=lambda name: sign * values[name]), *(name for name in values if name not in numbers)]
