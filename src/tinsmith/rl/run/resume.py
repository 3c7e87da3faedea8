"""`resume_from`: the state from which a run continues another run, or goes back to a checkpoint of its own.

A checkpoint is named by its tinker:// path or by its state file, checkpoints/step-000010.json of a run folder. Its
state is that file, or the metadata that the server stores with the checkpoint, or else derived from the step in its
name.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from tinsmith.errors import ConfigError
from tinsmith.plurals import counted
from tinsmith.rl.policy.models import CheckpointInfo, ModelConfig
from tinsmith.rl.record.layout import Layout
from tinsmith.rl.rollouts.queue import SavedQueue
from tinsmith.rl.rollouts.replay import SelectorState
from tinsmith.rl.run.state import (
    RandomStates,
    State,
    from_metadata,
    read_state_file,
)

_FIELDS = {
    "cursor": "the position in the tasks",
    "order": "the state of the task order",
    "batches": "batches sampled ahead",
    "store": "policy.store of workflows",
    "random": "the states of global random generators",
}
"""What a State's fields are called in messages."""


def starting_state(path: Path, newest: State | None, resume_from: str) -> State | None:
    """The state that the run in folder `path` continues from, given its newest state.

    A run that has already gone back to the checkpoint, or started from it, continues from its newest state. Returns
    None for a new run, and for one that starts from a checkpoint without a state file. Raises ConfigError.
    """
    own = [paths[0] for paths in newest.checkpoints] if newest else []
    named = None if not resume_from or resume_from in own else _state_in_file(resume_from)
    target = named.path if named else resume_from
    if newest is None:
        if named is None:
            return None
        return named.model_copy(update={"checkpoints": (), "sampling_path": "", "best": None, "origin": target})
    if target in ("", newest.origin, newest.path):
        return newest
    if target not in own:
        raise ConfigError(
            f"resume_from: {resume_from} is not a checkpoint of the run in {path}, which is at step {newest.step}.",
            f"Set another folder to start a run from it, or leave out resume_from. Checkpoints: {', '.join(own)}.",
        )
    earlier = next(
        (state for file in Layout(path).checkpoints() if (state := read_state_file(file)) and state.path == target),
        None,
    )
    if earlier is None:
        raise ConfigError(
            f"resume_from: {path}/checkpoints has no state of {target}.", "Set another folder to start a run from it."
        )
    best = earlier.best if earlier.best == newest.best else None  # a later one has taken its place on the server
    checkpoints = newest.checkpoints[: own.index(target) + 1]
    return earlier.model_copy(update={"checkpoints": checkpoints, "best": best, "origin": target})


def _state_in_file(resume_from: str) -> State | None:
    """The state in the file that the setting names; None for a tinker:// path."""
    if resume_from.startswith("tinker://"):
        return None
    file = Path(resume_from).expanduser()
    if (state := read_state_file(file)) is None:
        reason = "is not the state file of a checkpoint" if file.exists() else "does not exist"
        raise ConfigError(f"resume_from: {file} {reason}.", "Name a file FOLDER/checkpoints/step-000010.json.")
    return state


class TasksPerStep(NamedTuple):
    """What a step of the run draws."""

    tasks: int
    demonstrations: int


def state_of_checkpoint(info: CheckpointInfo, path: str, per_step: TasksPerStep, seed: int) -> tuple[State, str]:
    """State of a checkpoint of the server, and a sentence that says what of it is exact.

    Raises ConfigError if there is neither metadata nor a step in its name.
    """
    number = re.search(r"(\d+)$", path)
    step = int(number[1]) if number else 0
    derived = State(
        step=step,
        version=step,
        path=path,
        cursor=step * per_step.tasks,
        demonstrations_drawn=step * per_step.demonstrations,
        random=RandomStates.seeded(seed),
        batches=_sampled(step),
    )
    if (stored := from_metadata(info.metadata, derived)) is not None:
        state, lacking = stored
        if "batches" in lacking:
            state = state.model_copy(update={"batches": _sampled(state.step)})
        if "cursor" in lacking:
            state = state.model_copy(update={"cursor": state.step * per_step.tasks})
        parts = ", ".join(_FIELDS[name] for name in lacking)
        exact = "exact, by the state that the server stores with it"
        if lacking:
            exact += f", but for {parts}, which are only in its state file in the run folder"
        return state.model_copy(update={"origin": path}), exact
    if not number:
        raise ConfigError(
            f"resume_from: the server stores no state with {path}, and its name does not end in a step.",
            "Name its state file FOLDER/checkpoints/step-000010.json, or set model.load_from for its weights alone.",
        )
    exact = (
        f"weights and optimizer are exact; its name gives step and version {step}, and "
        f"{counted(derived.cursor, 'task')} and {counted(derived.demonstrations_drawn, 'demonstration')} drawn; the "
        "task order, adaptive coefficients and random generators are as at the start of a run"
    )
    return derived.model_copy(update={"origin": path}), exact


def _sampled(step: int) -> SavedQueue:
    """Batches up to that of `step` are used, and none waits."""
    return SavedQueue(reading=SelectorState(next=step + 1), sampled=step)


def check_adapter(info: CheckpointInfo, path: str, model: ModelConfig) -> None:
    """Raise ConfigError if the checkpoint is of another base model or its adapter has another shape."""
    wanted = {"name": model.name}
    if not model.load_from:  # which determines the shape in place of these settings
        names = ("rank", "train_attn", "train_mlp", "train_unembed")
        wanted |= {name: model.__dict__[name] for name in names}
    different = [name for name, value in info.adapter.items() if name in wanted and wanted[name] != value]
    if different:
        has = ", ".join(f"{name} {info.adapter[name]}" for name in different)
        sets = ", ".join(f"model.{name}={wanted[name]}" for name in different)
        raise ConfigError(
            f"resume_from: {path} has {has}; this run sets {sets}.",
            "Set model as in the run that saved it, or name another checkpoint.",
        )
