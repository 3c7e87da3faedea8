"""The runs under the folders of the dashboard, and what the list shows of each.

Runs are read back by `rl.history`. A list reads only the end of a run's metrics; all of them are read for its page, and
the tables of the runs looked at last are kept.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinsmith.dashboard.cache import FileCache
from tinsmith.rl.diagnosis import Diagnosis, diagnose
from tinsmith.rl.history import MetricTable, RunHistory, RunStatus, find_runs
from tinsmith.rl.history.status import read_status
from tinsmith.rl.record.metrics import measures_right

_SCAN_S = 2.0
"""Time for which the list of folders is good."""
_TAIL_BYTES = 1 << 16
"""The end of metrics.jsonl that has the last rows."""
_OPEN_RUNS = 6
"""Runs whose metrics are in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEntry:
    """A run of the dashboard. Cheap: nothing of it was read.

    Example: RunEntry(id="4f1c2a9be07d", label="runs/grpo/seed-0", folder=Path("/home/me/runs/grpo/seed-0"))
    """

    id: str
    """Name in the addresses of pages; the same for the same folder."""
    label: str
    """The folder's path, with the name of the folder that the dashboard was given first."""
    folder: Path
    part: str = ""
    """Name of the part of a run that it is: explore, explore-NAME or bench; empty for a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """What the list shows of a run."""

    entry: RunEntry
    status: RunStatus
    steps: int
    """Steps of the run; 0 if its file does not say it."""
    reward: float | None
    """The newest mean reward of a step."""
    held_out: tuple[str, float] | None
    """(measure, newest value) of the held-out tasks: pass@1, or reward where nothing says what is right."""
    written: float
    """Unix time of the last change of its metrics or settings."""
    settings: Mapping[str, Any]


class Runs:
    """The runs under folders. Methods may be called from any thread."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = [folder.absolute() for folder in folders]
        self.cache = FileCache()
        self._lock = threading.Lock()
        self._scanned = -math.inf
        self._entries: dict[str, RunEntry] = {}
        self._open: OrderedDict[str, RunHistory] = OrderedDict()

    def entries(self) -> list[RunEntry]:
        """All runs, those that changed last first."""
        with self._lock:
            if time.monotonic() - self._scanned > _SCAN_S:
                self._entries = {entry.id: entry for entry in self._scan()}
                self._scanned = time.monotonic()
            return list(self._entries.values())

    def find(self, run_id: str) -> RunEntry | None:
        """The run with an id; None if there is none now."""
        return next((entry for entry in self.entries() if entry.id == run_id), None)

    def open(self, entry: RunEntry) -> RunHistory:
        """The run itself, with its metrics read once for each change of their file."""
        with self._lock:
            run = self._open.pop(entry.id, None) or RunHistory(entry.folder, entry.part)
            self._open[entry.id] = run
            while len(self._open) > _OPEN_RUNS:
                self._open.popitem(last=False)
        return run

    def settings(self, entry: RunEntry) -> Mapping[str, Any]:
        """The settings of a run; empty if its run.yaml cannot be read."""
        run = RunHistory(entry.folder)
        return self.cache.read(run.layout.settings, "settings", lambda _: run.settings) or {}

    def summary(self, entry: RunEntry) -> RunSummary:
        """What the list shows of a run."""
        run, settings = RunHistory(entry.folder), self.settings(entry)
        last: Mapping[str, float] = self.cache.read(run.layout.metrics, "last", _last_values) or {}
        steps = settings.get("steps")
        return RunSummary(
            entry=entry,
            status=read_status(run.layout, entry.part, int(last.get("step", 0))),
            steps=steps if isinstance(steps, int) else 0,
            reward=last.get("reward/mean"),
            held_out=_held_out(last),
            written=max(map(_changed, (run.layout.metrics, run.layout.settings))),
            settings=settings,
        )

    def diagnosis(self, entry: RunEntry) -> Diagnosis:
        """What the metrics of a run say about whether it learns."""
        run = RunHistory(entry.folder)
        return (
            self.cache.read(run.layout.metrics, "diagnosis", lambda _: self._diagnose(entry, run.metrics))
            or Diagnosis()
        )

    def known_diagnosis(self, entry: RunEntry) -> Diagnosis | None:
        """The diagnosis, if it was made since the metrics have changed last."""
        return self.cache.current(RunHistory(entry.folder).layout.metrics, "diagnosis")

    def _diagnose(self, entry: RunEntry, metrics: MetricTable) -> Diagnosis:
        return diagnose(self.settings(entry), metrics.rows)

    def _scan(self) -> Iterator[RunEntry]:
        for folder in self.folders:
            for run in find_runs(folder):
                for each in (run, *run.stages, *run.parts.values()):
                    label = Path(folder.name) / each.path.relative_to(folder)
                    digest = hashlib.sha256(os.fsencode(each.path)).hexdigest()
                    yield RunEntry(id=digest[:12], label=str(label), folder=each.path, part=each.part_name)


_NEWEST = (
    "step", "reward/mean", "groups/all_right", "eval/pass@1", "eval/reward/mean", "eval/judged",
)  # fmt: skip
"""Metrics that the list needs."""


def _held_out(last: Mapping[str, float]) -> tuple[str, float] | None:
    measure, name = ("pass@1", "eval/pass@1") if measures_right([last]) else ("reward", "eval/reward/mean")
    return (measure, last[name]) if name in last else None


def _last_values(file: Path) -> dict[str, float]:
    """The newest value of each of _NEWEST; a run without one of them in the last rows is read no further."""
    with file.open("rb") as content:
        content.seek(max(0, file.stat().st_size - _TAIL_BYTES))
        lines = content.read().split(b"\n")
    last: dict[str, float] = {}
    for line in reversed(lines):
        try:
            row = json.loads(line)
        except ValueError:  # cut by the tail, or being written
            continue
        if isinstance(row, dict):
            newest = {name: row[name] for name in _NEWEST if _is_number(row.get(name))}
            last = {**newest, **last}
    return last


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _changed(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0
