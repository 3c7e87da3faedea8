"""The checkpoint with the best evaluation, which `checkpoint.keep: best` keeps as the result of the run."""

from __future__ import annotations

import math
from collections.abc import Mapping

from tinsmith.rl.config.checkpoints import CheckpointConfig
from tinsmith.rl.run.state import BestCheckpoint


class BestSoFar:
    """Follows the evaluations of a run, and says when one is better than all before it."""

    def __init__(self, config: CheckpointConfig, saved: BestCheckpoint | None) -> None:
        """`saved` is the best checkpoint of a resumed run."""
        self._config, self.saved, self.metric = config, saved, config.metric
        self.unsaved: float | None = None
        """The value of the evaluation after the last step if it is the best one; None otherwise, and once the weights
        are saved."""

    def observe(self, values: Mapping[str, float]) -> None:
        """Report the metrics of an evaluation of the weights that are saved next."""
        value = values.get(self.metric, math.nan)
        if self._config.keep != "best" or math.isnan(value):
            return
        sign = 1.0 if self._config.better == "higher" else -1.0
        if self.saved is None or sign * value > sign * self.saved.value:
            self.unsaved = value

    def save(self, best: BestCheckpoint) -> None:
        """Take note that the weights are saved."""
        self.saved, self.unsaved = best, None
