"""Stages of a run file: the values of the run that each of them is, before these are validated."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tinsmith.rl.algorithms.config import DATA_ONLY
from tinsmith.rl.config.fields import ROLLOUTS, RunSettings
from tinsmith.rl.record.layout import Layout
from tinsmith.settings import explicit_values

_TASKS = ("tasks", "workflow", "rewards")
"""Keys that environments replace."""
_OF_THE_RUN = ("model", "service", "stages", "folder", "resume", "resume_from", "time_limit", "grace_period")
"""Keys that a stage cannot set."""
_SHAPE = ("rank", "seed", "train_attn", "train_mlp", "train_unembed")
"""Keys of `model` that weights to start from determine."""


def stage_values(run: RunSettings, number: int, state: str) -> dict[str, Any]:
    """The values of stage `number`, counted from 1, as a run that starts from the weights at `state`.

    The first stage and stages of mode bench ignore `state`. Raises ValueError for a key that a stage cannot set.
    """
    stage, own = run.stages[number - 1], staleness_named(run.stages[number - 1].model_extra or {})
    if fixed := sorted(own.keys() & set(_OF_THE_RUN)):
        more = "; until.time_limit ends a stage" if fixed[0] == "time_limit" else ""
        raise ValueError(f"{fixed[0]} cannot differ between stages. Set {fixed[0]} outside of stages{more}.")
    if own.get("mode") == "explore":
        raise ValueError(
            "mode explore needs a second process that trains, which a stage cannot be. Leave out mode to sample and "
            "train, or run the stage's settings as a run of its own."
        )
    not_inherited = {"stages", "name", "time_limit", *(("until",) if own.get("mode") == "bench" else ())}
    if own.keys() & {"steps", "epochs"}:
        not_inherited |= {"steps", "epochs"}
    values = {name: part for name, part in explicit_values(run).items() if name not in not_inherited}
    if number > 1 and state and own.get("mode") != "bench":
        model = {name: part for name, part in values["model"].items() if name not in _SHAPE}
        values["model"] = {**model, "load_from": state}
    values["folder"] = str(Layout(Path(run.folder or f"runs/{run.name}")).stage(number, stage.name))
    values["name"] = f"{run.name} {stage.name}".strip()
    return {**_inherited(values, own), **own}


def staleness_named(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with the other name of `staleness` replaced. Raises ValueError if both are there."""
    own = dict(values)
    if "max_steps_off_policy" in own:
        if "staleness" in own:
            raise ValueError("staleness and max_steps_off_policy are two names of one key; leave out one of them")
        own["staleness"] = own.pop("max_steps_off_policy")
    return own


def _inherited(values: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The run's keys that a stage with the keys `own` inherits: without keys of rollouts if the stage samples none, and
    without tasks if it has environments or the reverse."""
    algorithm = own.get("algorithm", values.get("algorithm"))
    kind = algorithm.get("type") if isinstance(algorithm, Mapping) else None
    replaced = _TASKS if "environments" in own else ("environments",) if own.keys() & set(_TASKS) else ()
    values = {name: part for name, part in values.items() if name not in replaced}
    if kind not in DATA_ONLY:
        return values
    fields = RunSettings.model_fields
    return {name: part for name, part in values.items() if ROLLOUTS not in fields[name].metadata}


def check_stages(run: RunSettings) -> None:
    """Raise ValueError unless the stages fit each other and the run."""
    names = [stage.name for stage in run.stages]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two stages are called {twice[0]}; give each a name of its own")
    if run.mode in ("explore", "bench"):
        raise ValueError(f"mode {run.mode} has no stages; run the settings of one stage with its folder")
    if run.resume_from:
        raise ValueError("resume_from needs a run without stages; run the settings of one stage with its folder")
    trains = [(stage.model_extra or {}).get("mode") != "bench" for stage in run.stages]
    if not any(trains):
        raise ValueError("no stage trains; take mode bench for the whole run, without stages")
    for at, stage in enumerate(run.stages):
        if stage.keep_optimizer and not (trains[at] and any(trains[:at])):
            why = "no stage trains before it" if trains[at] else "mode bench trains nothing"
            raise ValueError(f"stage {stage.name}: {why}, so there is no optimizer to keep; leave out keep_optimizer")
