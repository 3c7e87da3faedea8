"""When what happens in a run of Trinity's: its mode, its steps, where it is written.

Leaves out what a step learns (`algorithm.py`) and from what (`data.py`), and by which weights (`sync.py`).
"""

from __future__ import annotations

from pathlib import Path

from tinsmith.dialects.base import Becoming
from tinsmith.dialects.trinity import lessons
from tinsmith.dialects.trinity.algorithm import SUPERVISED
from tinsmith.dialects.trinity.keys import TrinityFile
from tinsmith.dialects.trinity.names import REPEATS


def translate(file: TrinityFile, becoming: Becoming) -> None:
    """Mode, steps, folder, seed, concurrency."""
    _mode(file, becoming)
    _steps(file, becoming)
    folder = Path(file.checkpoint_root_dir) / file.project / file.group / file.name
    becoming.put("name", file.name)
    becoming.put("resume", True if file.continue_from_checkpoint else "rename")
    becoming.put("folder", str(folder))
    becoming.put("seed", max(0, file.explorer.rollout_model.seed))
    becoming.put("checkpoint.ttl_seconds", None)  # Trinity sets no end to what it saves
    _at_once(file, becoming)
    if not file.model.tinker.enable:
        becoming.put("service.dtype", _dtype(file, becoming))


def _mode(file: TrinityFile, becoming: Becoming) -> None:
    name = file.algorithm.algorithm_type
    if file.mode == "serve":
        becoming.fault("mode", "serving is no run.", "Use: tinsmith serve --model NAME")
    if name in SUPERVISED and file.mode != "train":
        becoming.fault("mode", f"{name} learns from data, not from rollouts.", "Set mode: train.")
    if file.mode in ("explore", "bench") or (file.mode == "train" and name not in SUPERVISED):
        becoming.fault("mode", f"{file.mode} alone is not here.", "Set mode: both.")
    if file.mode == "train" and not file.buffer.train_batch_size:
        cure = "Set it to the number of replies that one step learns from."
        becoming.fault("buffer.train_batch_size", "mode train wants it.", cure)


def _steps(file: TrinityFile, becoming: Becoming) -> None:
    buffer = file.buffer
    for key, value in (("buffer.batch_size", buffer.batch_size), ("buffer.total_epochs", buffer.total_epochs)):
        if value < 1:
            becoming.fault(key, f"{value} is none.", "Set 1 or more.")
            return
    group = file.algorithm.repeat_times or REPEATS.get(file.algorithm.algorithm_type, 2)
    if file.algorithm.algorithm_type in SUPERVISED:
        _ends(file, buffer.total_steps, becoming)
        return
    size = buffer.train_batch_size or buffer.batch_size * group
    if lessons.mixed(file):
        size = round(size * (1 - lessons.ratio(file)))
    if size % group or size < group:
        cure = f"Set a multiple of algorithm.repeat_times ({group}), or leave it out."
        becoming.fault("buffer.train_batch_size", f"{size} replies of the policy are no whole groups.", cure)
        return
    becoming.put("groups_per_step", size // group)
    asked = buffer.total_steps
    _ends(file, None if asked is None else asked * buffer.batch_size // (size // group), becoming)


def _ends(file: TrinityFile, asked: int | None, becoming: Becoming) -> None:
    """After so many steps, or else epochs; the trainer's own bound lies over both."""
    bound = file.trainer.total_steps
    if asked is None:
        becoming.put("epochs", file.buffer.total_epochs)
    if asked is not None or bound:
        becoming.put("steps", min(one for one in (asked, bound) if one))


def _at_once(file: TrinityFile, becoming: Becoming) -> None:
    runners, engines = file.explorer.runner_per_model, file.explorer.rollout_model.engine_num
    if runners < 1 or engines < 1:
        cure = "Set explorer.runner_per_model and rollout_model.engine_num to 1 or more."
        becoming.fault("explorer.runner_per_model", "nothing would be sampled.", cure)
        return
    becoming.put("concurrency", runners * engines)


def _dtype(file: TrinityFile, becoming: Becoming) -> str:
    """`auto` is bfloat16 wherever the hardware is fast at it."""
    dtypes = {"bfloat16": "auto", "float16": "auto", "auto": "auto", "float32": "float32"}
    given = file.explorer.rollout_model.dtype
    if given not in dtypes:
        cure = f"It is one of {', '.join(dtypes)}."
        becoming.fault("explorer.rollout_model.dtype", f"there is no '{given}'.", cure)
    return dtypes.get(given, "auto")
