"""State of a run: everything that it resumes from except the weights, which the server stores.

    state.json                      the newest state, written atomically as the last file of each checkpoint
    checkpoints/step-000010.json    the state of a checkpoint that is still on the server

The server stores the state too, as metadata of the checkpoint, so that another folder can continue from the
checkpoint's path alone. Metadata is small: what does not fit is left out, and named when a run starts from it.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from tinsmith.atomic import atomic_write
from tinsmith.errors import ConfigError
from tinsmith.rl.config.checkpoints import Checkpoints
from tinsmith.rl.record.layout import Layout
from tinsmith.rl.rollouts.queue import SavedQueue
from tinsmith.settings import Settings

log = logging.getLogger(__name__)

METADATA_KEY = "tinsmith_state"
_METADATA_LENGTH = 8000
"""Characters of the state in a checkpoint's metadata."""
_LONG = ("random", "batches", "order", "store")
"""Keys that may be too long for metadata."""


class RandomStates(Settings):
    """State of the global generators of Python and numpy, which custom rewards may use."""

    python: tuple[int, tuple[int, ...], float | None]
    numpy: tuple[str, tuple[int, ...], int, int, float]

    @classmethod
    def capture(cls) -> RandomStates:
        """The current states."""
        name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)  # type: ignore[misc]
        words = tuple(int(key) for key in keys)
        return cls(python=random.getstate(), numpy=(str(name), words, int(position), int(has_gauss), float(gauss)))

    @classmethod
    def seeded(cls, seed: int) -> RandomStates:
        """The states at the start of a run with `seed`."""
        name, keys, position, has_gauss, gauss = np.random.RandomState(seed % 2**32).get_state(legacy=True)  # type: ignore[misc]
        words = tuple(int(key) for key in keys)
        numpy_state = (str(name), words, int(position), int(has_gauss), float(gauss))
        return cls(python=random.Random(seed).getstate(), numpy=numpy_state)

    def restore(self) -> None:
        """Set the global generators to these states."""
        random.setstate(self.python)
        name, keys, position, has_gauss, gauss = self.numpy
        np.random.set_state((name, np.array(keys, np.uint32), position, has_gauss, gauss))


class BestCheckpoint(Settings):
    """The checkpoint with the best evaluation so far (`checkpoint.keep: best`)."""

    step: int
    value: float
    """Of checkpoint.metric."""
    path: str
    """tinker:// path of weights and optimizer state."""
    sampling_path: str
    """tinker:// path of the weights for sampling."""


class State(Settings):
    """Everything a run resumes from except the weights, which the server stores at `path`."""

    step: int
    """Completed steps."""
    version: int
    """Updates of the policy; steps without a training signal do not count."""
    path: str
    """tinker:// path of the policy's weights and optimizer state."""
    cursor: int
    """Number of training tasks drawn."""
    order: dict[str, Any] = Field(default_factory=dict)
    """State of the task order, such as the difficulty estimates of a curriculum."""
    demonstrations_drawn: int = 0
    """Number of demonstrations drawn."""
    random: RandomStates
    """State of the global random generators."""
    batches: SavedQueue = SavedQueue()
    """Which batches were sampled and trained on, and the batches that wait for training."""
    algorithm: dict[str, float] = Field(default_factory=dict)
    """Adaptive coefficients of the algorithm by name."""
    reference: str = ""
    """Reference model of divergences: a base model's name or a tinker:// path."""
    backoff: dict[str, float] = Field(default_factory=dict)
    """State of `backoff`."""
    ending: dict[str, float] = Field(default_factory=dict)
    """State of the conditions of `until`."""
    evaluation_due: bool = False
    """Whether an early stop cancelled the evaluation after this step."""
    critic_path: str = ""
    """tinker:// path of the critic's state; empty without a critic."""
    store: dict[str, Any] = Field(default_factory=dict)
    """The values of `policy.store` of workflows that JSON can hold."""
    checkpoints: Checkpoints = ()
    """Checkpoints stored on the server, oldest first."""
    sampling_path: str = ""
    """tinker:// path of the weights for sampling that are the result: the final ones, or the best; set after the last
    step."""
    best: BestCheckpoint | None = None
    """The best checkpoint, with `checkpoint.keep: best`."""
    origin: str = ""
    """tinker:// path of the checkpoint that `resume_from` named last; empty if the run started at its beginning."""

    @property
    def result_path(self) -> str:
        """tinker:// path of the state that is the result of the run: that of the best checkpoint, or the last."""
        return self.best.path if self.best else self.path


_STATE = TypeAdapter(State)


def read_state(path: Path) -> State | None:
    """The state saved in run folder `path`; None before the first checkpoint.

    If state.json is damaged, that of the newest checkpoint whose file is whole. Raises ConfigError if there is none.
    """
    file = Layout(path).state
    if not file.exists():
        return None
    for candidate in (file, *reversed(Layout(path).checkpoints())):
        if (state := read_state_file(candidate)) is not None:
            if candidate != file:
                log.warning("%s is damaged; the run continues from %s", file, candidate)
            return state
    raise ConfigError(f"{file} is damaged, and no file in checkpoints/ is whole.", "Restore it, or set another folder.")


def read_state_file(file: Path) -> State | None:
    """The state in `file`; None if it holds no state or cannot be read."""
    try:
        return _STATE.validate_json(file.read_bytes())
    except (OSError, ValidationError):
        return None


def write_state(file: Path, state: State) -> None:
    """Write `state` atomically; durable when this returns."""
    file.parent.mkdir(exist_ok=True)
    atomic_write(file, _STATE.dump_json(state))


def json_values(store: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the values that JSON can hold; logs a warning that names the others."""
    saved: dict[str, Any] = {}
    for key, value in store.items():
        try:
            saved[key] = json.loads(json.dumps(value))
        except (TypeError, ValueError):
            log.warning("policy.store[%r] is not saved: JSON cannot hold a %s", key, type(value).__name__)
    return saved


def as_metadata(state: State, seed: int) -> dict[str, str]:
    """The state as metadata of its checkpoint, without what the length does not allow.

    Generators that were not used since the run was seeded are stored as null.
    """
    values = state.model_dump(mode="json", exclude={"path", "checkpoints", "sampling_path", "origin", "best"})
    if state.random == RandomStates.seeded(seed):
        values["random"] = None
    for key in sorted(_LONG, key=lambda key: -len(_compact(values[key]))):
        if len(_compact(values)) <= _METADATA_LENGTH:
            break
        del values[key]
        if key == "batches" and (state.batches.batches or state.batches.unfinished):
            del values["cursor"]  # it is after the tasks of the batches that are left out
    return {METADATA_KEY: _compact(values)}


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def from_metadata(metadata: Mapping[str, str], derived: State) -> tuple[State, tuple[str, ...]] | None:
    """The state in metadata of a checkpoint, and the names of the fields that it lacks; None if it holds no state.

    Fields that the metadata lacks are those of `derived`.
    """
    values = json.loads(metadata.get(METADATA_KEY, "{}"))
    if not values:
        return None
    names = {field.serialization_alias or name: name for name, field in State.model_fields.items()}
    stored = {names[key]: value for key, value in values.items() if key in names}
    lacking = sorted({"cursor", "random", "batches", "order", "store"} - stored.keys())
    if stored.get("random", 0) is None:
        del stored["random"]
    return _STATE.validate_python({**derived.model_dump(), **stored}), tuple(lacking)
