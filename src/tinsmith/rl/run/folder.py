"""The run folder: who may use it, and how an interrupted run resumes in it. `record/layout.py` has its files.

On resume, log entries after the last checkpoint are discarded, because those steps run again. With staleness 0, a
resumed run gives the same result as an uninterrupted one.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, get_args

from omegaconf import OmegaConf

from tinsmith.atomic import atomic_write
from tinsmith.errors import ConfigError
from tinsmith.rl.config.checkpoints import Checkpoints
from tinsmith.rl.ending.stop import StopSignal
from tinsmith.rl.record.layout import BENCH, Kind, Layout
from tinsmith.rl.run.resume import starting_state
from tinsmith.rl.run.state import (
    State,
    read_state,
    read_state_file,
    write_state,
)
from tinsmith.settings import flatten, to_yaml, writable_folder

log = logging.getLogger(__name__)

_MAY_CHANGE = (
    "name", "description", "folder", "mode", "bench", "steps", "epochs", "until", "time_limit", "grace_period", "eval",
    "allow_high_staleness", "sampler",
    "checkpoint", "monitors", "service", "concurrency", "log_level", "resume", "resume_from", "rollout", "stages",
    "sync.timeout", "sync.keep", "model.wait", "model.base_url", "model.api_key_env", "model.tokenizer",
)  # fmt: skip
"""Keys that may change when a run resumes: they do not affect the steps already done."""
_RESERVE_MB = 64
RESERVE_BYTES = _RESERVE_MB << 20
"""Free bytes of the disk below which no step begins."""
_LOOK_SECONDS = 1.0
_LOCK_ATTEMPTS, _LOCK_SECONDS = 5, 0.02
_SHARED_KEYS = (
    "model.name", "groups_per_step", "group_size", "staleness", "sync.style", "sync.interval",
    "buffer.type", "buffer.path", "buffer.url", "buffer.run", "buffer.max_staleness", "buffer.replay",
)  # fmt: skip
"""Keys that must be equal in the training process and the samplers of a run."""
_PLACES = ("buffer.path", "buffer.url", "buffer.run")
"""Keys that may differ between machines: they may reach one buffer by several addresses."""
_SHARED_KEYS_OF_BENCH = ("model.name",)


class RunFolder:
    """Files of a run, locked by one process per mode."""

    def __init__(self, path: Path, lock: IO[str], newest: State | None, start: State | None) -> None:
        """`newest` is the state in the folder; `start` is the one to continue from, which `start_at` confirms."""
        self.path, self.layout, self.state = path, Layout(path), start
        self.goes_back = start is not newest
        self._lock = lock

    @classmethod
    def open(
        cls, path: Path, settings: Mapping[str, Any], *, resume: bool = True, resume_from: str = "", part: str = ""
    ) -> RunFolder:
        """Create the folder, or resume the run in it.

        `part` is empty for the training process. `explore`, `explore-NAME` and `bench` name a process whose settings
        are in a subfolder of that name; it does not change the files of the training process.

        Raises ConfigError if the folder cannot be written, is in use, or holds a run with other settings.
        """
        path = path.absolute()  # user code may change the working directory
        layout = Layout(path)
        own = layout.part(part)
        writable_folder(own.path, "folder")
        lock = layout.lock(part).open("w")
        try:
            lock_run(lock, path)
            _check_resumable(own, settings, resume, part)
            for other in sorted({"", *layout.explore_parts()} - {part}):
                _check_shared_keys(
                    layout.part(other), settings, _SHARED_KEYS_OF_BENCH if part == BENCH else _SHARED_KEYS
                )
            newest = read_state(path)
            start = starting_state(path, newest, resume_from)
        except BaseException:
            lock.close()
            raise
        atomic_write(own.settings, to_yaml(settings).encode())
        if not part:
            for file in layout.unfinished():
                file.unlink(missing_ok=True)
            _discard_logs_after(layout, newest.step if newest else -1)
        return cls(path, lock, newest, start)

    def start_at(self, state: State) -> None:
        """Continue from `state`: discard the logs and state files of later steps."""
        self.save(state)
        self.goes_back = False
        _discard_logs_after(self.layout, state.step)
        for file in self.layout.checkpoints():
            if file > self.layout.checkpoint(state.step):
                file.unlink()

    def save(self, state: State) -> None:
        """Write the state of a checkpoint, state.json last; durable when this returns."""
        write_state(self.layout.checkpoint(state.step), state)
        write_state(self.layout.state, state)
        self.state = state

    def forget(self, checkpoints: Checkpoints) -> None:
        """Delete the state files of deleted checkpoints."""
        deleted = {paths[0] for paths in checkpoints}
        for file in self.layout.checkpoints():
            if not deleted:
                return
            if (state := read_state_file(file)) is not None and state.path in deleted:
                deleted.remove(state.path)
                file.unlink()

    async def wait_for_room(self, stop: StopSignal) -> None:
        """Wait while the disk has less than RESERVE_BYTES free. Raises StopRequested if the run is to stop."""
        noted = False
        while (free := shutil.disk_usage(self.path).free) < RESERVE_BYTES:
            if not noted:
                noted = True
                log.warning("%s has %d MB free; the run waits until there are %d", self.path, free >> 20, _RESERVE_MB)
            stop.check()
            await asyncio.sleep(_LOOK_SECONDS)
        if noted:
            log.warning("%s has room again", self.path)

    def close(self) -> None:
        """Release the lock."""
        self._lock.close()


def lock_run(lock: IO[str], path: Path) -> None:
    """Lock the file for this process, as long as it is open. Raises ConfigError if another process has it."""
    for _ in range(_LOCK_ATTEMPTS):  # a reader that looks whether the run goes on holds it for microseconds
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(_LOCK_SECONDS)
    raise ConfigError(f"Another process is using the run folder {path}.", "Wait until it ends, or set another folder.")


def _check_resumable(layout: Layout, settings: Mapping[str, Any], resume: bool, part: str) -> None:
    file = layout.settings
    if not file.exists():
        return
    if not resume:
        raise ConfigError(
            f"{layout.path} already holds a run.", "Set another folder, or resume=true to resume the run."
        )
    changed = [key for key in _changed(file, settings) if not _under(key, _MAY_CHANGE)]
    # A run that could not connect to its server has none of these, and may change all its settings.
    begun = (layout.state, layout.metrics, layout.stages, layout.buffer)
    if changed and (part or any(map(Path.exists, begun))):
        raise ConfigError(
            f"{layout.path} holds a run with different settings: {', '.join(changed)}.",
            "Restore these settings to resume the run, or set another folder, such as folder=runs/another.",
        )


def _check_shared_keys(layout: Layout, settings: Mapping[str, Any], shared_keys: tuple[str, ...]) -> None:
    """Raises ConfigError if the process of the same run with these files has other values of `shared_keys`."""
    file = layout.settings
    different = [key for key in _changed(file, settings) if _under(key, shared_keys)] if file.exists() else []
    if different:
        raise ConfigError(
            f"{file} belongs to the same run but differs in {', '.join(different)}.",
            "Set the same values in both run files, or set another folder, such as folder=runs/another.",
        )


def shared_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The values, by dotted key, that all processes of a run must have in common, wherever they run."""
    flat = flatten(settings)
    return {key: value for key, value in flat.items() if _under(key, _SHARED_KEYS) and not _under(key, _PLACES)}


def _changed(file: Path, settings: Mapping[str, Any]) -> list[str]:
    """Dotted keys whose values differ between `file` and `settings`."""
    old, new = flatten(OmegaConf.to_container(OmegaConf.load(file))), flatten(settings)
    return sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))


def _under(key: str, keys: tuple[str, ...]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in keys)


def _discard_logs_after(layout: Layout, step: int) -> None:
    """Delete metrics, the timeline and rollouts of steps after `step`."""
    for log in filter(Path.exists, (layout.metrics, layout.timeline)):
        lines = [line for line in log.read_bytes().splitlines(keepends=True) if _up_to(line, step)]
        atomic_write(log, b"".join(lines))
    for kind in get_args(Kind):
        for later in layout.steps_with_rollouts(kind):
            if later > step:
                layout.rollouts(kind, later).unlink()


def _up_to(line: bytes, step: int) -> bool:
    try:
        return line.endswith(b"\n") and json.loads(line)["step"] <= step
    except (ValueError, TypeError, LookupError):  # the process was killed while it wrote this line
        return False
