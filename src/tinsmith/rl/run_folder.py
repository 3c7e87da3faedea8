"""The run folder: its files, and how an interrupted run resumes.

    run.yaml        the settings, written at the start; those of mode explore or bench are in a folder of that name
    metrics.jsonl   a row for each step; rollouts/ has every rollout (monitors/jsonl.py)
    state.json      the state to resume from: written last at each checkpoint, atomically
    report.html     the run as a page (monitors/report.py)

Logs written after the last checkpoint are discarded when a run resumes, since those steps run again. With staleness 0,
an interrupted run ends exactly like an uninterrupted one.
"""

from __future__ import annotations

import fcntl
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
from omegaconf import OmegaConf
from pydantic import ConfigDict, Field, TypeAdapter

from tinsmith.atomic import atomic_write
from tinsmith.errors import ConfigError
from tinsmith.rl.rollouts.batch_source import BatchSourceState
from tinsmith.settings import Settings, writable_folder

SETTINGS = "run.yaml"
_MAY_CHANGE = (
    "name", "description", "folder", "mode", "bench", "steps", "epochs", "eval", "checkpoint", "monitors", "service",
    "concurrency", "log_level", "resume", "rollout", "stages", "sync.timeout", "sync.keep", "model.base_url",
    "model.tokenizer",
)  # fmt: skip
"""Keys that may change when a run resumes: none of them affects what was learned so far."""
_SHARED_KEYS = (
    "model.name", "groups_per_step", "group_size", "staleness", "sync.style", "sync.interval",
    "buffer.type", "buffer.path", "buffer.url", "buffer.run", "buffer.max_staleness", "buffer.replay",
)  # fmt: skip
"""Keys that must agree between the two processes of a run."""
_SHARED_KEYS_OF_PART = {"": _SHARED_KEYS, "explore": _SHARED_KEYS, "bench": ("model.name",)}


Checkpoints = tuple[tuple[str, ...], ...]
"""The tinker:// paths of each, oldest first: the policy's state and the critic's."""


class CheckpointConfig(Settings):
    """When to save what a broken-off run needs to go on."""

    every: int = Field(default=10, ge=0)
    """Every so many steps; 0 is only at the end."""
    ttl_seconds: int | None = Field(default=604_800, ge=3600)
    """How long the server keeps them (a week); null is for good. The last one is kept for good."""
    keep: int = Field(default=0, ge=0)
    """Delete all but so many, the newest; 0 deletes none."""

    def cut(self, checkpoints: Checkpoints) -> tuple[Checkpoints, Checkpoints]:
        """(to delete, to keep) of all there are, oldest first."""
        at = max(0, len(checkpoints) - self.keep) if self.keep else 0
        return checkpoints[:at], checkpoints[at:]


class RandomStates(Settings):
    """Of Python's and numpy's global generators, which rewards of users may draw from."""

    python: tuple[int, tuple[int, ...], float | None]
    numpy: tuple[str, tuple[int, ...], int, int, float]

    @classmethod
    def capture(cls) -> RandomStates:
        """As they are now."""
        name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)  # type: ignore[misc]
        words = tuple(int(key) for key in keys)
        return cls(python=random.getstate(), numpy=(str(name), words, int(position), int(has_gauss), float(gauss)))

    def restore(self) -> None:
        """As they were."""
        random.setstate(self.python)
        name, keys, position, has_gauss, gauss = self.numpy
        np.random.set_state((name, np.array(keys, np.uint32), position, has_gauss, gauss))


class State(Settings):
    """Everything but the weights, which are on the server at `path`."""

    model_config = ConfigDict(populate_by_name=True)

    step: int
    """Steps done."""
    version: int
    """Updates made: steps in which there was nothing to learn are not among them."""
    path: str
    """The tinker:// state, with optimizer."""
    cursor: int
    """Training tasks drawn."""
    order: dict[str, Any] = Field(default_factory=dict)
    """What their order has learned, beside."""
    demonstrations_drawn: int = Field(default=0, validation_alias="lessons", serialization_alias="lessons")
    """Demonstrations drawn; `lessons` in the file."""
    random: RandomStates
    batches: BatchSourceState = Field(
        default=BatchSourceState(), validation_alias="supply", serialization_alias="supply"
    )
    """Which batches were sampled and trained on; those sampled ahead and not yet trained on."""
    algorithm: dict[str, float] = Field(default_factory=dict)
    """Coefficients that adapt."""
    reference: str = ""
    """Whose logprobs divergences are taken from: a base model's name, or a path."""
    critic_path: str = ""
    """The critic's tinker:// state, if there is a critic."""
    checkpoints: Checkpoints = ()
    """On the server, the newest last."""
    sampling_path: str = ""
    """Weights to sample from; only after the last step."""


_STATE = TypeAdapter(State)


def read_state(path: Path) -> State | None:
    """Where the run in a folder is; None where there is none yet."""
    file = path / "state.json"
    return _STATE.validate_json(file.read_bytes()) if file.exists() else None


class RunFolder:
    """One run's files, held by one process at a time."""

    def __init__(self, path: Path, lock: IO[str], state: State | None) -> None:
        self.path, self.state = path, state
        self._lock = lock

    @classmethod
    def open(
        cls, path: Path, settings: Mapping[str, Any], *, resume: bool | Literal["rename"] = True, part: str = ""
    ) -> RunFolder:
        """Makes the folder, or goes on in it. Raises ConfigError where it cannot, or it holds another run or is in use.

        `part` is that of a process beside the one that trains: its settings are in a folder of its own, and what the
        others wrote is left as it is.
        """
        own = writable_folder(path / part, "folder")
        lock = (path / (f".lock-{part}" if part else ".lock")).open("w")
        try:
            _hold(lock, path)
            _same_run(own, settings, resume)
            for other in {"", "explore"} - {part}:
                _agrees(path / other, settings, _SHARED_KEYS_OF_PART[part])
            state = read_state(path)
        except BaseException:
            lock.close()
            raise
        atomic_write(own / SETTINGS, OmegaConf.to_yaml(OmegaConf.create(dict(settings))).encode())
        if not part:
            _take_back(path, state.step if state else -1)
        return cls(path, lock, state)

    def save(self, state: State) -> None:
        """On disk, whole, when this returns."""
        atomic_write(self.path / "state.json", _STATE.dump_json(state, by_alias=True))
        self.state = state

    def close(self) -> None:
        """Others may have the folder."""
        self._lock.close()


def _hold(lock: IO[str], path: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise ConfigError(f"A run is under way in {path}.", "Wait for it, or set another folder.") from error


def _same_run(path: Path, settings: Mapping[str, Any], resume: bool | Literal["rename"]) -> None:
    file = path / SETTINGS
    if not file.exists():
        return
    if not resume:
        raise ConfigError(
            f"{path} holds a run already.", "Set another folder, or leave out resume=false to go on with it."
        )
    changed = [key for key in _changed(file, settings) if not _under(key, _MAY_CHANGE)]
    if changed:
        raise ConfigError(
            f"{path} holds a run with other settings: {', '.join(changed)}.",
            "Put them back to go on with it, or set another folder, as in folder=runs/another.",
        )


def _agrees(other: Path, settings: Mapping[str, Any], alike: tuple[str, ...]) -> None:
    """Raises ConfigError where another process of the run has other settings of those that both go by."""
    file = other / SETTINGS
    differ = [key for key in _changed(file, settings) if _under(key, alike)] if file.exists() else []
    if differ:
        raise ConfigError(
            f"{file} is of the same run, and differs in {', '.join(differ)}.",
            "Make them alike in both files, or set another folder, as in folder=runs/another.",
        )


def _changed(file: Path, settings: Mapping[str, Any]) -> list[str]:
    before, now = _flat(_renamed(OmegaConf.to_container(OmegaConf.load(file)))), _flat(_renamed(dict(settings)))
    return sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))


def _renamed(settings: Any) -> Any:
    """`settings` with the former name of `demonstrations` replaced."""
    return {"demonstrations" if key == "experts" else key: value for key, value in settings.items()}


def _under(key: str, keys: tuple[str, ...]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in keys)


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings and lists as dotted keys."""
    pairs = enumerate(tree) if isinstance(tree, list | tuple) else tree.items() if isinstance(tree, Mapping) else None
    if pairs is None:
        return {prefix[:-1]: tree}
    return {key: value for name, part in pairs for key, value in _flat(part, f"{prefix}{name}.").items()}


def _take_back(path: Path, step: int) -> None:
    """Forgets what was logged after `step`."""
    metrics = path / "metrics.jsonl"
    if metrics.exists():
        lines = [line for line in metrics.read_bytes().splitlines(keepends=True) if _up_to(line, step)]
        atomic_write(metrics, b"".join(lines))
    for file in (path / "rollouts").glob("*-*.jsonl"):
        if int(file.stem.rpartition("-")[2]) > step:
            file.unlink()


def _up_to(line: bytes, step: int) -> bool:
    try:
        return json.loads(line)["step"] <= step
    except ValueError:  # the line that was being written when the process was killed
        return False
