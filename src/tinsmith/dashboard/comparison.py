"""Runs beside each other: the settings in which they differ, and paired statistics of their evaluations.

Runs that differ in nothing but their seeds count as one: its result on a task is the mean over the seeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tinsmith.dashboard.cache import FileCache
from tinsmith.rl.history import RunHistory
from tinsmith.rl.record.comparison import TaskResult, compare_results, read_results
from tinsmith.settings import flatten

_THRESHOLD = 1.0
"""`eval.threshold` of a run whose settings cannot be read."""
_SOURCES = 12
"""More sources of tasks than these are compared as one."""
_IGNORED = ("folder", "name", "service.data")


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingDifference:
    """A setting that is not the same in all runs."""

    key: str
    entries: Sequence[Any]
    """Its value in each run; None where the run has no such key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison:
    """A run, or the seeds of one, against the first, on the tasks of their evaluations after one step."""

    first: str
    second: str
    rows: Sequence[Mapping[str, Any]] = ()
    """Rows as in comparison.json."""
    reason: str = ""
    """Why there are no rows."""


Named = tuple[str, Sequence[RunHistory]]
"""A label, and the runs of its seeds."""


def setting_differences(settings: Sequence[Mapping[str, Any]]) -> list[SettingDifference]:
    """The settings that differ between runs, by dotted key."""
    flat = [flatten(each) for each in settings]
    keys = sorted({key for each in flat for key in each if key not in _IGNORED})
    rows = [SettingDifference(key=key, entries=[each.get(key) for each in flat]) for key in keys]
    return [row for row in rows if any(value != row.entries[0] for value in row.entries)]


def paired(first: Named, second: Named, cache: FileCache) -> RunComparison:
    """Compare after the newest step that all runs have evaluated."""
    runs = [*first[1], *second[1]]
    steps = {run.name: set(run.rollouts.steps("eval")) for run in runs}
    if without := [name for name, each in steps.items() if not each]:
        reason = f"{', '.join(without)} has no evaluation yet."
        return RunComparison(first=first[0], second=second[0], reason=reason)
    if not (common := set.intersection(*steps.values())):
        return RunComparison(first=first[0], second=second[0], reason="No step was evaluated in all runs.")
    step = max(common)
    names = (f"{first[0]}, step {step}", f"{second[0]}, step {step}")
    place = repr([str(run.path) for run in runs])
    newest = max((run.layout.rollouts("eval", step) for run in runs), key=_changed)
    rows = cache.read(newest, f"{names} {place}", partial(_rows, names, first[1], second[1], step)) or []
    reason = "" if rows else f"The held-out tasks after step {step} differ: no task can be paired."
    return RunComparison(first=names[0], second=names[1], rows=rows, reason=reason)


def _rows(
    names: tuple[str, str], first: Sequence[RunHistory], second: Sequence[RunHistory], step: int, _file: Path
) -> list[dict[str, Any]]:
    results = [_mean_results([_results(run, step) for run in runs]) for runs in (first, second)]
    sources = [result.task.rpartition("/")[0] for result in results[0]]
    sources = sources if len(set(sources)) <= _SOURCES else [""] * len(sources)
    compared = compare_results((names[0], results[0]), (names[1], results[1]), sources, seed=0)
    return [each.row for each in compared]


def _mean_results(seeds: Sequence[Sequence[TaskResult]]) -> list[TaskResult]:
    """The mean over seeds of each task; none if the seeds have other tasks than each other."""
    tasks = [result.task for result in seeds[0]]
    if any([result.task for result in results] != tasks for results in seeds):
        return []
    return [_mean_result(results) for results in zip(*seeds, strict=True)]


def _mean_result(results: Sequence[TaskResult]) -> TaskResult:
    rewards = [result.reward for result in results if result.reward is not None]
    names = dict.fromkeys(name for result in results for name in result.errors)
    errors = {name: [result.errors[name] for result in results if name in result.errors] for name in names}
    return TaskResult(
        task=results[0].task,
        passed=sum(result.passed for result in results) / len(results),
        reward=sum(rewards) / len(rewards) if rewards else None,
        errors={name: sum(values) / len(values) for name, values in errors.items()},
        judged=any(result.judged for result in results),
    )


def _results(run: RunHistory, step: int) -> list[TaskResult]:
    evaluation = run.settings.get("eval")
    threshold = evaluation.get("threshold") if isinstance(evaluation, Mapping) else None
    is_number = isinstance(threshold, int | float)
    return read_results(run.layout.rollouts("eval", step), threshold if is_number else _THRESHOLD)


def _changed(file: Path) -> float:
    return file.stat().st_mtime
