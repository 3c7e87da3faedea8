"""A run folder read back: `RunHistory`. Nothing is locked or started; each property reads the files as they are now."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from tinsmith.errors import ConfigError
from tinsmith.rl.history.index import RolloutIndex
from tinsmith.rl.history.metric_table import MetricTable
from tinsmith.rl.history.status import RunStatus, read_status
from tinsmith.rl.record.layout import BENCH, Layout

_DEPTH = 6
"""Levels of folders that are searched for runs."""
_SKIPPED = ("rollouts", "checkpoints", "service", "tensorboard", "wandb", "buffer", "node_modules", "__pycache__")


class RunHistory:
    """What a run folder holds.

    Example: RunHistory.open(Path("runs/demo")).metrics.last("reward/mean")
    """

    def __init__(self, path: Path, part: str = "") -> None:
        """`part`: the name of the part of a run folder that `path` is, such as bench; empty for a whole run."""
        self.path, self.layout, self.part_name = path, Layout(path), part
        self.rollouts = RolloutIndex(self.layout)
        """The rollouts of the run, in an index."""
        self._metrics: tuple[tuple[int, int], MetricTable] | None = None

    @classmethod
    def open(cls, path: Path) -> RunHistory:
        """The run in `path`. Raises ConfigError if the folder holds no run."""
        run, layout = cls(path), Layout(path)
        files = (layout.settings, layout.metrics, layout.rollouts_folder, layout.stages)
        if not any(file.exists() for file in files) and not run.parts:
            raise ConfigError(
                f"There is no run in {path}.", "Name the folder of a run, which holds its run.yaml and metrics.jsonl."
            )
        return run

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of run.yaml; empty if the file is missing or damaged."""
        with suppress(OSError, UnicodeDecodeError, yaml.YAMLError):
            values = yaml.load(self.layout.settings.read_text(encoding="utf-8"), yaml.CSafeLoader)
            return values if isinstance(values, dict) else {}
        return {}

    @property
    def name(self) -> str:
        """The name of the run; that of its folder if run.yaml has none."""
        return str(self.settings.get("name") or self.path.absolute().name)

    @property
    def step_count(self) -> int:
        """The number of steps that the run is to take; 0 if it is not known."""
        steps = self.settings.get("steps")
        return steps if isinstance(steps, int) else 0

    @property
    def metrics(self) -> MetricTable:
        """The metrics, read again if the file has changed."""
        from tinsmith.rl.record.monitors.jsonl import read_metrics

        try:
            status = self.layout.metrics.stat()
        except OSError:
            return MetricTable([])
        version = status.st_size, status.st_mtime_ns
        if self._metrics is None or self._metrics[0] != version:
            self._metrics = version, MetricTable(read_metrics(self.path))
        return self._metrics[1]

    @property
    def status(self) -> RunStatus:
        """Whether the run goes on, has finished, was stopped or has died."""
        return read_status(self.layout, self.part_name, max([0, *self.metrics.steps]))

    @property
    def comparison(self) -> list[dict[str, Any]]:
        """The rows of comparison.json; none if there is no such file."""
        return _rows(self.layout.comparison)

    @property
    def results(self) -> list[dict[str, Any]]:
        """The metrics of each checkpoint of mode bench; none in other parts."""
        return _rows(self.layout.results)

    @property
    def timeline(self) -> list[Any]:
        """The spans of timeline.jsonl (`record.timeline.Span`), in the order in which they were written."""
        from tinsmith.rl.record import timeline

        return list(timeline.read(self.path))

    @cached_property
    def state(self) -> Mapping[str, Any]:
        """state.json, from which the run resumes; empty if there is none."""
        with suppress(OSError, ValueError):
            state = json.loads(self.layout.state.read_bytes())
            return state if isinstance(state, dict) else {}
        return {}

    @property
    def parts(self) -> dict[str, RunHistory]:
        """What other processes of the run have recorded, by name: explore, explore-NAME, bench."""
        names = [*sorted(self.layout.explore_parts()), BENCH]
        return {
            name: RunHistory(part.path, name) for name in names if (part := self.layout.part(name)).settings.exists()
        }

    @property
    def stages(self) -> list[RunHistory]:
        """The runs of the stages that have begun, in order; none of a run without stages."""
        if not self.layout.stages.exists():
            return []
        folders = sorted(file.parent for file in self.path.glob(f"[0-9][0-9]-*/{self.layout.settings.name}"))
        return [RunHistory(folder) for folder in folders]


def _rows(file: Path) -> list[dict[str, Any]]:
    """The rows of a JSON file; none if it is missing or damaged."""
    with suppress(OSError, ValueError):
        rows = json.loads(file.read_bytes())
        return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    return []


def find_runs(folder: Path) -> list[RunHistory]:
    """The run in `folder` itself, or the runs below it, the newest first; without stages, which their run has."""
    runs = [RunHistory(path) for path in _run_folders(folder, _DEPTH)]
    return sorted(runs, key=_changed, reverse=True)


def _run_folders(folder: Path, depth: int) -> Iterator[Path]:
    layout = Layout(folder)
    if layout.settings.exists() or (layout.metrics.exists() and layout.rollouts_folder.exists()):
        yield folder
        return
    if depth == 0:
        return
    try:
        inside = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False))
    except OSError:
        return
    for name in inside:
        if not name.startswith(".") and name not in _SKIPPED:
            yield from _run_folders(folder / name, depth - 1)


def _changed(run: RunHistory) -> float:
    files = (run.layout.metrics, run.layout.log, run.layout.settings, run.layout.stages)
    times = [0.0]
    for file in files:
        with suppress(OSError):
            times.append(file.stat().st_mtime)
    return max(times)
