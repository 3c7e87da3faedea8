"""What the rules read: the settings and rows of a run, where any number may be missing or not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tinsmith.rl.diagnosis import thresholds

_LEAST = 5
"""Steps at each end that are compared, at least; else a fifth of all."""
_FEW = 4
"""Steps from which a clear rise of the reward counts."""
_LARGEST = 1e100
"""Numbers beyond it count as not finite, so that their squares are."""


@dataclass(frozen=True, slots=True)
class Ends:
    """Means of a metric over the first and the last steps that have it.

    Example: Ends(first=0.2, last=0.6, error=0.05, count=40)
    """

    first: float
    last: float
    error: float
    """Standard error of the difference."""
    count: int
    """Steps that have the metric."""

    @property
    def change(self) -> float:
        """The last minus the first."""
        return self.last - self.first

    @property
    def rose(self) -> bool:
        """Whether the metric rose by more than noise."""
        return self.change > max(thresholds.GAIN.value * self.error, 1e-9)


class Evidence:
    """Settings and rows, joined by step."""

    def __init__(self, settings: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
        self.settings = settings
        joined: dict[int, dict[str, Any]] = {}
        for row in rows:
            if (step := _finite(row.get("step"))) is not None:
                joined.setdefault(int(step), {}).update(row)
        self.rows = [{**joined[step], "step": step} for step in sorted(joined)]

    @cached_property
    def steps(self) -> list[dict[str, Any]]:
        """The rows of steps, without those that have only an evaluation."""
        return [row for row in self.rows if row["step"] > 0 and any(_of_step(name) for name in row)]

    @cached_property
    def trained(self) -> list[dict[str, Any]]:
        """The rows of steps that a trainer made."""
        return [row for row in self.steps if any(name.startswith("optim/") for name in row)]

    @cached_property
    def updates(self) -> int:
        """Number of steps that updated the weights."""
        return sum(not finite(row.get("optim/skipped")) for row in self.trained)

    @property
    def total(self) -> int:
        """Number of steps of the run; 0 if the settings do not say it."""
        return int(self.number("steps"))

    @property
    def ended(self) -> bool:
        """Whether the last steps are there, as far as the settings say."""
        done = self.rows[-1]["step"] if self.rows else 0
        return bool(done) and done >= thresholds.END.value * self.total

    def setting(self, path: str, default: Any = None) -> Any:
        """The setting at a dotted path."""
        value: Any = self.settings
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return default if value is None else value

    def number(self, path: str, default: float = 0.0) -> float:
        """The setting at a dotted path as a number; `default` if it is none."""
        value = _finite(self.setting(path))
        return default if value is None else value

    def curve(self, name: str) -> list[float]:
        """The finite values of a metric, in order of steps."""
        return [value for row in self.rows if (value := _finite(row.get(name))) is not None]

    @property
    def max_turns(self) -> list[float]:
        """Share of the rollouts of each step that ended at the largest number of turns; rows without any lack it."""
        return [finite(row.get("rollouts/max_turns")) for row in self.steps if "rollouts/cut" in row]

    def ends(self, name: str, least: int | None = None) -> Ends | None:
        """The first and the last values of a metric; None if fewer than `least` steps have it, by default those of a
        trend."""
        values = self.curve(name)
        if len(values) < (thresholds.TREND_STEPS.value if least is None else least) or len(values) < 2:
            return None
        size = ends_size(len(values))
        first, last = values[:size], values[-size:]
        error = math.sqrt(_variance(first) / size + _variance(last) / size)
        return Ends(_mean(first), _mean(last), error, len(values))

    def recent(self, name: str) -> float | None:
        """Mean of the last values of a metric; None before there are a few."""
        return self.recent_of(self.curve(name))

    def recent_of(self, values: Sequence[float]) -> float | None:
        """Mean of the last of some values, one for each step; None before there are a few."""
        size = min(max(_LEAST, len(values) // 5), len(values))
        return _mean(values[-size:]) if len(values) >= self.least_steps else None

    @property
    def least_steps(self) -> int:
        """Steps before a rule about single steps speaks."""
        least = int(thresholds.STEPS.value)
        return max(1, min(least, self.total)) if self.total else least

    @cached_property
    def entropy(self) -> str:
        """The name of the metric of the entropy: that of all sampled tokens, or else that of the trained ones."""
        return "policy/entropy" if self.curve("policy/entropy") else "optim/entropy"

    def right_groups(self, row: Mapping[str, Any]) -> float:
        """Share of the groups of a step whose replies are all right; where nothing says what is right, those are whose
        rewards reach `eval.threshold`, as in an evaluation."""
        if "groups/all_right" in row:
            return finite(row["groups/all_right"])
        reached = finite(row.get("reward/mean")) >= self.number("eval.threshold", 1.0)
        return float(reached and finite(row.get("groups/constant")) >= 1)

    @property
    def reward(self) -> Ends | None:
        """The reward of the first and the last steps."""
        return self.ends("reward/mean")

    @property
    def improves(self) -> bool:
        """Whether the reward rose by more than noise, also in the few steps of a run that has just begun."""
        ends = self.ends("reward/mean", _FEW)
        return ends is not None and ends.rose

    @property
    def solved(self) -> bool:
        """Whether nearly all replies are right, by the training tasks or else by the held-out ones."""
        right = self.recent("groups/all_right")
        if right is None:
            right = (self.curve("eval/pass@1") or [0.0])[-1]
            is_said = any(self.curve("eval/judged") or [1.0])  # else every reward of eval.threshold counts as right
            return right >= thresholds.SOLVED.value and (is_said or self.is_near_top)
        return right >= thresholds.SOLVED.value

    @property
    def is_near_top(self) -> bool:
        """Whether rewards hardly vary any more, above 0: there is little left to gain."""
        deviation, mean = self.recent("reward/std"), self.recent("reward/mean")
        return deviation is not None and mean is not None and deviation < 0.1 * abs(mean) and mean > 0

    @property
    def is_settled(self) -> bool:
        """Whether rewards are above the first and vary little: most groups have learned what there is to learn."""
        deviation, mean, first = self.recent("reward/std"), self.recent("reward/mean"), self.curve("reward/mean")[:1]
        return deviation is not None and mean is not None and mean > max(first[0], 0.0) and deviation < 0.25 * mean

    @property
    def converged(self) -> bool:
        """Whether the policy has become sure of better replies: the reward rose, and most groups are not all wrong."""
        return self.solved or (self.improves and (self.recent("groups/all_wrong") or 0.0) <= thresholds.UPDATED.value)


def ends_size(count: int) -> int:
    """Steps at each end of `count` that are compared."""
    return min(max(_LEAST, count // 5), count // 2)


def _of_step(name: str) -> bool:
    return not name.startswith("eval/") and name not in ("step", "time/eval")


def _finite(value: Any) -> float | None:
    """The value as a number; None if it is missing, not a number or not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= _LARGEST else None  # False for NaN


def finite(value: Any) -> float:
    """The value as a number; 0 if it is none."""
    return _finite(value) or 0.0


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _variance(values: Sequence[float]) -> float:
    mean = _mean(values)
    return math.fsum((value - mean) ** 2 for value in values) / max(1, len(values) - 1)
