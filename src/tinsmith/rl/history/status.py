"""Whether a run goes on, has finished, was stopped or has died: by its lock, its state and the end of its log."""

from __future__ import annotations

import fcntl
import json
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tinsmith.rl.record.layout import Layout

Condition = Literal["running", "finished", "stopped", "died", "new"]
"""`stopped`: by a limit, a signal or Ctrl-C, with a checkpoint to continue from; `died`: by an error, or killed;
`new`: nothing is recorded yet."""

_TAIL_BYTES = 65_536
_STOPPED = re.compile(r"(?:INFO|WARNING) [\w.]+: Stopped by (?P<reason>.+)")
_ERROR = re.compile(r"ERROR [\w.]+: The run was stopped by (?P<reason>.+)")
_BEGUN = re.compile(r"INFO [\w.]+: .+: starting at step ")
_FINISHED = re.compile(r"INFO [\w.]+: Finished: ")


@dataclass(frozen=True, slots=True)
class RunStatus:
    """Condition of a run.

    Example: RunStatus("died", "ConfigError: the server has no model X", step=12)
    """

    condition: Condition
    reason: str = ""
    """Why the run stopped or died, if the log says so."""
    step: int = 0
    """Steps that are recorded."""


def read_status(layout: Layout, part: str, step: int) -> RunStatus:
    """The status of a run folder after `step` recorded steps; `part` is that of the process whose files these are."""
    folder = Layout(layout.path.parent) if part else layout
    if is_locked(folder.lock(part)):
        return RunStatus("running", step=step)
    condition, reason = end_of_log(layout.log)
    if condition is None and (_is_complete(layout, step) or (part and layout.results.exists())):
        condition = "finished"
    if condition is None:
        condition = "died" if step or layout.metrics.exists() or layout.log.exists() else "new"
    return RunStatus(condition, reason, step)


def is_locked(file: Path) -> bool:
    """Whether a process of this machine holds the lock of a run folder."""
    try:
        with file.open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # released as the file closes
    except BlockingIOError:
        return True
    except OSError:  # there is none, or the file system has no locks
        return False
    return False


def end_of_log(log: Path) -> tuple[Condition | None, str]:
    """What the log says of how the newest process ended; None if it does not say it."""
    condition: Condition | None = None
    reason = ""
    for line in _tail(log).splitlines():
        if _BEGUN.search(line):
            condition, reason = None, ""
        elif _FINISHED.search(line):
            condition, reason = "finished", ""
        elif match := _STOPPED.search(line):
            condition, reason = "stopped", match["reason"]
        elif match := _ERROR.search(line):
            condition, reason = ("stopped" if _by_user(match["reason"]) else "died"), match["reason"]
    return condition, reason


def _by_user(reason: str) -> bool:
    return reason.startswith(("KeyboardInterrupt", "CancelledError", "Interrupted"))


def _is_complete(layout: Layout, step: int) -> bool:
    """Whether the last state is that after the last step, and no later step is recorded."""
    with suppress(OSError, ValueError, TypeError, LookupError):
        if layout.stages.exists():
            stages = json.loads(layout.stages.read_bytes())
            return not stages["under_way"] and list(stages["ended"]) == stages["stages"]
        state = json.loads(layout.state.read_bytes())
        return bool(state["sampling_path"]) and state["step"] >= step
    return False


def _tail(file: Path) -> str:
    try:
        with file.open("rb") as content:
            content.seek(max(0, file.stat().st_size - _TAIL_BYTES))
            return content.read(_TAIL_BYTES).decode(errors="replace")
    except OSError:
        return ""
