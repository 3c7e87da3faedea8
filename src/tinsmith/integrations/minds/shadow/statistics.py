"""Running mean and standard deviation of the effects on each probe, so that effects can be compared between probes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

_LEAST = 1e-9
"""Least standard deviation."""


@dataclass(frozen=True, slots=True)
class Moments:
    """Mean and standard deviation of effects.

    Example: Moments(0.02, 0.007).z(0.034) == 2.0
    """

    mean: float
    std: float

    def z(self, delta: float) -> float:
        """How many standard deviations an effect is above the mean."""
        return (delta - self.mean) / max(self.std, _LEAST)


class ProbeStatistics:
    """Counts the effects of training rollouts by probe.

    Effects of rollouts of one version count from the next version on, in order of size: so scores do not depend on the
    order in which rollouts finish. `state` holds JSON values only; in the store of a run, it is saved with checkpoints.
    """

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state
        state.setdefault("version", 0)
        state.setdefault("counted", {})
        state.setdefault("new", {})

    def add(self, probe: str, version: int, delta: float) -> None:
        """Count an effect on a probe by a rollout of `version`."""
        self._count_older(version)
        self._state["new"].setdefault(probe, []).append(delta)

    def moments(self, probe: str, version: int) -> Moments | None:
        """Moments of the effects before `version`; None before the first.

        A probe with fewer than two has the standard deviation of all probes' effects about their means.
        """
        self._count_older(version)
        counted = self._state["counted"]
        if probe not in counted:
            return None
        count, mean, squares = counted[probe]
        if count < 2:
            freedom = sum(each[0] - 1 for each in counted.values())
            squares, count = sum(each[2] for each in counted.values()), freedom + 1
        if count < 2 or squares <= 0:
            return None
        return Moments(mean, math.sqrt(squares / (count - 1)))

    def _count_older(self, version: int) -> None:
        state = self._state
        if version <= state["version"]:
            return
        state["version"] = version
        for probe, deltas in sorted(state["new"].items()):
            for delta in sorted(deltas):
                count, mean, squares = state["counted"].get(probe, (0, 0.0, 0.0))
                step = delta - mean
                mean += step / (count + 1)
                state["counted"][probe] = [count + 1, mean, squares + step * (delta - mean)]
        state["new"] = {}


def moments_of(deltas: list[float]) -> Moments:
    """Moments of a few effects; of a single one, mean 0 and its size."""
    if len(deltas) < 2 or np.ptp(deltas) == 0:
        return Moments(0.0, max(abs(deltas[0]), _LEAST) if deltas else 1.0)
    return Moments(float(np.mean(deltas)), float(np.std(deltas, ddof=1)))
