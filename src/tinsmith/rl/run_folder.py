"""The run folder: its files, and how an interrupted run resumes.

    run.yaml        the settings, written at the start; explore/ and bench/ hold those of these modes
    metrics.jsonl   one row per step; rollouts/ holds every rollout (monitors/jsonl.py)
    state.json      the state to resume from, written atomically as the last file of each checkpoint
    report.html     the report (monitors/report.py)

On resume, log entries after the last checkpoint are discarded, because those steps run again. With staleness 0, a
resumed run gives the same result as an uninterrupted one.
"""

from __future__ import annotations

import fcntl
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

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
"""Keys that may change when a run resumes: they do not affect the steps already done."""
_SHARED_KEYS = (
    "model.name", "groups_per_step", "group_size", "staleness", "sync.style", "sync.interval",
    "buffer.type", "buffer.path", "buffer.url", "buffer.run", "buffer.max_staleness", "buffer.replay",
)  # fmt: skip
"""Keys that must be equal in the training process and the explorer of a run."""
_SHARED_KEYS_OF_PART = {"": _SHARED_KEYS, "explore": _SHARED_KEYS, "bench": ("model.name",)}


Checkpoints = tuple[tuple[str, ...], ...]
"""Checkpoints, oldest first; each is the tinker:// paths of its states: the policy's and, if any, the critic's."""


class CheckpointConfig(Settings):
    """When to save checkpoints, which an interrupted run resumes from."""

    every: int = Field(default=10, ge=0)
    """Steps between checkpoints; 0 saves only at the end of the run."""
    ttl_seconds: int | None = Field(default=604_800, ge=3600)
    """Seconds until the server deletes a checkpoint (default one week); null: never. The last one never expires."""
    keep: int = Field(default=0, ge=0)
    """Number of newest checkpoints to keep; older ones are deleted. 0 keeps all."""

    def cut(self, checkpoints: Checkpoints) -> tuple[Checkpoints, Checkpoints]:
        """Split `checkpoints`, oldest first, into (to delete, to keep)."""
        excess = max(0, len(checkpoints) - self.keep) if self.keep else 0
        return checkpoints[:excess], checkpoints[excess:]


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

    def restore(self) -> None:
        """Set the global generators to these states."""
        random.setstate(self.python)
        name, keys, position, has_gauss, gauss = self.numpy
        np.random.set_state((name, np.array(keys, np.uint32), position, has_gauss, gauss))


class State(Settings):
    """Everything a run resumes from except the weights, which the server stores at `path`."""

    model_config = ConfigDict(populate_by_name=True)

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
    demonstrations_drawn: int = Field(default=0, validation_alias="lessons", serialization_alias="lessons")
    """Number of demonstrations drawn. The file keeps an older key."""
    random: RandomStates
    """State of the global random generators."""
    batches: BatchSourceState = Field(
        default=BatchSourceState(), validation_alias="supply", serialization_alias="supply"
    )
    """Which batches were sampled and trained on, and the batches that wait for training."""
    algorithm: dict[str, float] = Field(default_factory=dict)
    """Adaptive coefficients of the algorithm by name."""
    reference: str = ""
    """Reference model of divergences: a base model's name or a tinker:// path."""
    critic_path: str = ""
    """tinker:// path of the critic's state; empty without a critic."""
    checkpoints: Checkpoints = ()
    """Checkpoints stored on the server, oldest first."""
    sampling_path: str = ""
    """tinker:// path of the final weights for sampling; set after the last step."""


_STATE = TypeAdapter(State)


def read_state(path: Path) -> State | None:
    """The state saved in run folder `path`; None before the first checkpoint."""
    file = path / "state.json"
    return _STATE.validate_json(file.read_bytes()) if file.exists() else None


class RunFolder:
    """Files of a run, locked by one process per mode."""

    def __init__(self, path: Path, lock: IO[str], state: State | None) -> None:
        self.path, self.state = path, state
        self._lock = lock

    @classmethod
    def open(cls, path: Path, settings: Mapping[str, Any], *, resume: bool = True, part: str = "") -> RunFolder:
        """Create the folder, or resume the run in it.

        `part` is empty for the training process. `explore` and `bench` name a process whose settings are in a subfolder
        of that name; it does not change the files of the training process.

        Raises ConfigError if the folder cannot be written, is in use, or holds a run with other settings.
        """
        own = writable_folder(path / part, "folder")
        lock = (path / (f".lock-{part}" if part else ".lock")).open("w")
        try:
            _acquire(lock, path)
            _check_resumable(own, settings, resume)
            for other_part in {"", "explore"} - {part}:
                _check_shared_keys(path / other_part, settings, _SHARED_KEYS_OF_PART[part])
            state = read_state(path)
        except BaseException:
            lock.close()
            raise
        atomic_write(own / SETTINGS, OmegaConf.to_yaml(OmegaConf.create(dict(settings))).encode())
        if not part:
            _discard_logs_after(path, state.step if state else -1)
        return cls(path, lock, state)

    def save(self, state: State) -> None:
        """Write state.json atomically; durable when this returns."""
        atomic_write(self.path / "state.json", _STATE.dump_json(state, by_alias=True))
        self.state = state

    def close(self) -> None:
        """Release the lock."""
        self._lock.close()


def _acquire(lock: IO[str], path: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise ConfigError(
            f"Another process is using the run folder {path}.", "Wait until it ends, or set another folder."
        ) from error


def _check_resumable(path: Path, settings: Mapping[str, Any], resume: bool) -> None:
    file = path / SETTINGS
    if not file.exists():
        return
    if not resume:
        raise ConfigError(f"{path} already holds a run.", "Set another folder, or resume=true to resume the run.")
    changed = [key for key in _changed(file, settings) if not _under(key, _MAY_CHANGE)]
    if changed:
        raise ConfigError(
            f"{path} holds a run with different settings: {', '.join(changed)}.",
            "Restore these settings to resume the run, or set another folder, such as folder=runs/another.",
        )


def _check_shared_keys(folder: Path, settings: Mapping[str, Any], shared_keys: tuple[str, ...]) -> None:
    """Raises ConfigError if the process of the same run with settings in `folder` has other values of `shared_keys`."""
    file = folder / SETTINGS
    different = [key for key in _changed(file, settings) if _under(key, shared_keys)] if file.exists() else []
    if different:
        raise ConfigError(
            f"{file} belongs to the same run but differs in {', '.join(different)}.",
            "Set the same values in both run files, or set another folder, such as folder=runs/another.",
        )


def _changed(file: Path, settings: Mapping[str, Any]) -> list[str]:
    """Dotted keys whose values differ between `file` and `settings`."""
    old, new = _flatten(_renamed(OmegaConf.to_container(OmegaConf.load(file)))), _flatten(_renamed(dict(settings)))
    return sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))


def _renamed(settings: Any) -> Any:
    """`settings` with the former name of `demonstrations` replaced."""
    return {"demonstrations" if key == "experts" else key: value for key, value in settings.items()}


def _under(key: str, keys: tuple[str, ...]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in keys)


def _flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings and lists as one mapping with dotted keys."""
    pairs = enumerate(tree) if isinstance(tree, list | tuple) else tree.items() if isinstance(tree, Mapping) else None
    if pairs is None:
        return {prefix[:-1]: tree}
    return {key: value for name, subtree in pairs for key, value in _flatten(subtree, f"{prefix}{name}.").items()}


def _discard_logs_after(path: Path, step: int) -> None:
    """Delete metrics and rollouts of steps after `step`."""
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
    except ValueError:  # the process was killed while it wrote this line
        return False
