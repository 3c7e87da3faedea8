"""A run in TensorBoard: a curve for each metric, in the run folder's `tensorboard`. Wants the package tensorboard.

tensorboard --logdir runs
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from tinsmith.rl.monitors.base import Kind, RunInfo
from tinsmith.rl.monitors.trackers import Tracker, missing
from tinsmith.rl.types import Group


class TensorboardConfig(Tracker):
    """TensorBoard files in the run folder."""

    type: Literal["tensorboard"] = "tensorboard"
    folder: str = ""
    """Where to; empty: `tensorboard` in the run folder."""


class TensorboardMonitor:
    """Appends; what was written after the step that the run goes on from is hidden."""

    def __init__(self, config: TensorboardConfig, info: RunInfo) -> None:
        """Raises ConfigError without the package."""
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError as error:
            raise missing("tensorboard", "tensorboard") from error
        self._config = config
        folder = config.folder or str(info.folder / "tensorboard")
        self._writer = SummaryWriter(folder, purge_step=info.start + 1 if info.start else None)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """On disk within seconds, so that the page may follow."""
        for name, value in self._config.told(values).items():
            self._writer.add_scalar(name, value, step)

    def rollouts(self, step: int, kind: Kind, groups: Sequence[Group]) -> None:
        """Not written."""

    def close(self) -> None:
        """Writes what is left."""
        self._writer.close()
