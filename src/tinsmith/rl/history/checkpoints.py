"""The checkpoints of a run folder, by name: the result of the run, its best, its last, or that of a step.

Their weights are on the server that the run trained on: of a run with a service of its own, in `data_folder`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinsmith.errors import ConfigError
from tinsmith.rl.history.rows import items
from tinsmith.rl.history.run import RunHistory
from tinsmith.rl.record.layout import Layout

_OF_SERVICE = "checkpoints"
"""A folder that each data folder of a service has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCheckpoint:
    """A checkpoint of a run.

    Example: find_checkpoint(RunHistory.open(Path("runs/demo")), "best").path
    """

    run: RunHistory
    """The run that saved it; of a run in stages, the stage."""
    step: int
    path: str
    """tinker:// path of weights and optimizer state."""
    sampling_path: str
    """tinker:// path of the weights alone; that of the state where they were not saved alone."""

    @property
    def is_of_dry_run(self) -> bool:
        """Whether the run's own service had the fake engine."""
        service = self.run.settings.get("service")
        return isinstance(service, dict) and service.get("engine") == "fake" and data_folder(self.run) is not None


def find_checkpoint(run: RunHistory, which: str = "") -> RunCheckpoint:
    """The checkpoint that `which` names: best, last, or the number of a step; empty: the result of the run.

    The result is the best checkpoint if `checkpoint.keep` is best, else the last. Of a run in stages, the checkpoints
    are those of the last stage that has any. Raises ConfigError if there is none.
    """
    saved = _saved(run)
    if not saved:
        for stage in reversed(run.stages):
            if _saved(stage):
                return find_checkpoint(stage, which)
        raise ConfigError(f"{run.path} has no checkpoint yet.", "Wait for the first one: checkpoint.every steps.")
    best, last = _kept_best(run), saved[max(saved)]
    if which in ("", "last"):
        return last if which or best is None else best
    if which == "best":
        return best or _best_evaluated(run, saved)
    if not (which.isascii() and which.isdigit()):
        raise ConfigError(f"--checkpoint {which!r} names no checkpoint.", "Give best, last or the number of a step.")
    if int(which) in saved:
        return saved[int(which)]
    if best and best.step == int(which):
        return best
    steps = ", ".join(map(str, sorted(saved)))
    raise ConfigError(f"{run.path} has no checkpoint of step {which}.", f"It has those of steps {steps}.")


def data_folder(run: RunHistory) -> Path | None:
    """The data folder of the service that the run, its sweep or the run of its stage started; None if there is none."""
    path = run.path.absolute()
    folders = (run.layout.service, *(Layout(folder).service for folder in (path.parent, path.parent.parent)))
    return next((folder for folder in folders if (folder / _OF_SERVICE).is_dir()), None)


def _saved(run: RunHistory) -> dict[int, RunCheckpoint]:
    """The checkpoints that the server still has as far as the run's files say, by their steps."""
    state = run.state
    on_server = [paths[0] for each in items(state.get("checkpoints")) if (paths := items(each))]
    saved = {}
    for file in run.layout.checkpoints():
        with suppress(OSError, ValueError):
            values = json.loads(file.read_bytes())
            if (
                isinstance(values, dict)
                and (not on_server or values.get("path") in on_server)
                and (each := _of(run, values))
            ):
                saved[each.step] = each
    if newest := _of(run, state):
        saved[newest.step] = newest
    return saved


def _of(run: RunHistory, values: Mapping[str, Any]) -> RunCheckpoint | None:
    """The checkpoint of a state, whose `sampling_path` may be that of the best one."""
    step, path, best = values.get("step"), values.get("path"), values.get("best")
    if not isinstance(step, int) or not isinstance(path, str) or not path:
        return None
    alone = values.get("sampling_path") if not isinstance(best, dict) or best.get("step") == step else ""
    return RunCheckpoint(run=run, step=step, path=path, sampling_path=alone or path)


def _kept_best(run: RunHistory) -> RunCheckpoint | None:
    """The best checkpoint of a run with `checkpoint.keep: best`."""
    best = run.state.get("best")
    if not isinstance(best, dict) or not isinstance(best.get("step"), int) or not best.get("path"):
        return None
    path = str(best["path"])
    return RunCheckpoint(run=run, step=best["step"], path=path, sampling_path=best.get("sampling_path") or path)


def _best_evaluated(run: RunHistory, saved: Mapping[int, RunCheckpoint]) -> RunCheckpoint:
    """The saved checkpoint with the best evaluation. Raises ConfigError if none was evaluated."""
    config = run.settings.get("checkpoint")
    config = config if isinstance(config, dict) else {}
    metric = str(config.get("metric") or "eval/reward/mean")
    sign = -1.0 if config.get("better") == "lower" else 1.0
    values = {
        step: sign * value for step, value in run.metrics.points(metric) if step in saved and math.isfinite(value)
    }
    if not values:
        raise ConfigError(
            f"No checkpoint of {run.path} was evaluated by {metric}.",
            "Give last or the number of a step, or let the run keep its best: checkpoint.keep=best.",
        )
    return saved[max(values, key=lambda step: values[step])]
