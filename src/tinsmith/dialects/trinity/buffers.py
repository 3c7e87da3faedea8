"""Trinity's `experience_buffer` of rollouts as `buffer` of ours: where they wait, and which are trained on again.

A queue is the run's own memory, or a folder of files where two processes meet. Leaves out data to learn from as it
stands (`lessons.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tinsmith.dialects.base import Becoming, idle
from tinsmith.dialects.trinity.algorithm import SUPERVISED
from tinsmith.dialects.trinity.arguments import Part, To, laid_over, near
from tinsmith.dialects.trinity.data import database
from tinsmith.dialects.trinity.schema import TrinityFile
from tinsmith.dialects.trinity.schema_buffer import Buffer, Replay

KEY = "buffer.trainer_input.experience_buffer"
_DECAY = {"decay": To(("decay",))}
_LIMITED = Part("linear_decay_limited", {**_DECAY, "use_count_limit": To(("limit",)), "sigma": To(("sigma",))})
PRIORITIES = {
    "linear_decay": Part("linear_decay", _DECAY),
    "decay_limit_randomization": _LIMITED,
    "linear_decay_use_count_control_randomization": _LIMITED,
}
MEETING = ("explore", "train")
"""Modes of which two processes make one run."""


def translate(file: TrinityFile, becoming: Becoming) -> None:
    """`buffer`."""
    own = file.buffer.trainer_input.experience_buffer or Buffer()
    if file.algorithm.algorithm_type in SUPERVISED:
        return
    if file.mode == "bench":
        idle(own, becoming, f"{KEY}.", "mode bench trains nothing.")
        return
    found: dict[str, Any] = {"type": "memory", **becoming.settings.pop("buffer", {})}
    _place(file, own, found, becoming)
    _replay(own.replay_buffer or Replay(), found, becoming)
    _bounds(file, own, found, becoming)
    if len(found) > 1 or found["type"] != "memory":
        becoming.settings["buffer"] = found
    rest = own.model_copy(update={"replay_buffer": None})
    for name in ("storage_type", "path", "capacity", "max_read_timeout"):
        rest.model_fields_set.discard(name)
    idle(rest, becoming, f"{KEY}.", "it is about data to learn from as it stands; rollouts are the run's own.")


def _place(file: TrinityFile, own: Buffer, found: dict[str, Any], becoming: Becoming) -> None:
    folder = Path(file.checkpoint_root_dir) / file.project / file.group / file.name
    if own.storage_type == "sql":
        found |= {"type": "sql", "url": database(own.path or f"sqlite:///{folder}/buffer.db")}
        if own.name:
            found["run"] = own.name
        return
    if own.storage_type == "queue":
        if own.path:
            becoming.note(f"{KEY}.path: Trinity copies its queue there; here rollouts are in {folder} anyway.")
        if file.mode in MEETING:
            found["type"] = "file"
        return
    found["type"] = "file"
    if own.path:
        found["path"] = str(Path(own.path).with_suffix(""))
        becoming.note(f"{KEY}.path: batches are files of the folder {found['path']}.")


def _replay(replay: Replay, found: dict[str, Any], becoming: Becoming) -> None:
    if not replay.enable:
        why = "it counts only with enable: true."
        if replay.model_fields_set - {"enable"}:
            idle(replay, becoming, f"{KEY}.replay_buffer.", why)
        return
    part = PRIORITIES.get(replay.priority_fn)
    if part is None:
        what = f"there is no '{replay.priority_fn}'."
        becoming.fault(f"{KEY}.replay_buffer.priority_fn", what, near(replay.priority_fn, PRIORITIES))
        return
    settings = laid_over(part, replay.priority_fn_args, f"{KEY}.replay_buffer.priority_fn_args", {}, becoming)
    settings["priority"] = settings.pop("type")
    found["replay"] = {"enable": True, "cooldown": replay.reuse_cooldown_time, **settings}


def _bounds(file: TrinityFile, own: Buffer, found: dict[str, Any], becoming: Becoming) -> None:
    if own.capacity < 1:
        becoming.fault(f"{KEY}.capacity", f"{own.capacity} batches are none.", "Set 1 or more.")
    elif "capacity" in own.model_fields_set:
        if "replay" in found:
            found["replay"]["size"] = own.capacity
        elif file.synchronizer.sync_style == "fixed":
            becoming.note(f"{KEY}.capacity: in sync_style fixed, interval and offset say how far sampling runs ahead.")
        else:
            found["capacity"] = own.capacity
    if own.max_read_timeout <= 0:
        becoming.fault(f"{KEY}.max_read_timeout", f"{own.max_read_timeout:g} seconds are none.", "Set more than 0.")
    elif "max_read_timeout" in own.model_fields_set:
        if file.mode == "train":
            becoming.put("sync.timeout", own.max_read_timeout)
        else:
            becoming.note(f"{KEY}.max_read_timeout: it counts in mode train, which waits for another process.")
