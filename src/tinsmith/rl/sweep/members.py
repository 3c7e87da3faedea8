"""The runs of a sweep, and how far each has come: read from their folders, whether they run or not."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tinsmith.rl.config import RunConfig
from tinsmith.rl.record.layout import Layout
from tinsmith.rl.record.monitors.jsonl import read_metrics
from tinsmith.rl.run.parts import folder_path
from tinsmith.rl.sweep.combinations import Combination

HELD_OUT_REWARD, REWARD = "eval/reward/mean", "reward/mean"


@dataclass(frozen=True, slots=True)
class Member:
    """A run of a sweep: its values, and its settings with its folder and name."""

    combination: Combination
    config: RunConfig

    @property
    def name(self) -> str:
        """Its name in the sweep."""
        return self.combination.name

    @property
    def digest(self) -> str:
        """Of its settings."""
        return hashlib.sha256(self.config.model_dump_json().encode()).hexdigest()[:16]

    @property
    def path(self) -> Path:
        """The folder with its metrics; of a run in stages, that of the last stage which trains."""
        runs = self.config.runs
        return folder_path(([run for run in runs if run.mode != "bench"] or runs)[-1])

    def curve(self, metric: str) -> list[tuple[int, float]]:
        """The values of a metric by step."""
        return [(int(row["step"]), row[metric]) for row in read_metrics(self.path) if metric in row]

    @property
    def step(self) -> int:
        """The last step with metrics."""
        rows = read_metrics(self.path)
        return int(rows[-1]["step"]) if rows else 0

    @property
    def bytes_of_metrics(self) -> int:
        """Length of its metrics, which differs whenever there are new ones."""
        file = Layout(self.path).metrics
        return file.stat().st_size if file.exists() else 0


def metric_of(members: Sequence[Member]) -> str:
    """The metric to judge by where none is named: held-out reward if every run evaluates, else the training reward."""
    configs = [member.config for member in members if not member.config.stages]
    return HELD_OUT_REWARD if configs and all(_evaluates(config) for config in configs) else REWARD


def _evaluates(config: RunConfig) -> bool:
    return config.evaluates and bool(config.eval.every or config.eval.after)
