"""When what happens in a run of Trinity's: its mode, its steps, where it is written.

Leaves out what a step learns (`algorithm.py`) and from what (`data.py`), and by which weights (`sync.py`).
"""

from __future__ import annotations

from pathlib import Path

from tinsmith.dialects.base import Becoming
from tinsmith.dialects.trinity import demonstrations
from tinsmith.dialects.trinity.algorithm import SUPERVISED
from tinsmith.dialects.trinity.data import training
from tinsmith.dialects.trinity.name_tables import REPEATS
from tinsmith.dialects.trinity.schema import TrinityFile

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def translate(file: TrinityFile, becoming: Becoming) -> None:
    """Mode, steps, folder, seed, concurrency."""
    _mode(file, becoming)
    _steps(file, becoming)
    folder = Path(file.checkpoint_root_dir) / file.project / file.group / file.name
    becoming.put("name", file.name)
    becoming.put("resume", True if file.continue_from_checkpoint else "rename")
    becoming.put("folder", str(folder))
    _log(file, becoming)
    becoming.put("seed", max(0, file.explorer.rollout_model.seed))
    becoming.put("checkpoint.ttl_seconds", None)  # Trinity sets no end to what it saves
    _at_once(file, becoming)
    if "dtype" in file.explorer.rollout_model.model_fields_set:
        if file.model.tinker.enable:
            becoming.note("explorer.rollout_model.dtype: with model.tinker the server decides.")
        else:
            becoming.put("service.dtype", _dtype(file, becoming))


def _mode(file: TrinityFile, becoming: Becoming) -> None:
    name, explorer = file.algorithm.algorithm_type, file.explorer
    if file.mode == "serve":
        model = file.model.tinker.base_model or file.model.model_path or "NAME"
        command = f"tinsmith serve --model {model} --host {explorer.listen_address} --port {explorer.proxy_port}"
        becoming.fault("mode", "serving is a command of its own, with OpenAI's API beside Tinker's.", f"Use: {command}")
        return
    if name in SUPERVISED and file.mode not in ("train", "bench"):
        becoming.fault("mode", f"{name} learns from data, not from rollouts.", "Set mode: train.")
    if file.mode == "train" and not file.buffer.train_batch_size:
        cure = "Set it to the number of replies that one step learns from."
        becoming.fault("buffer.train_batch_size", "mode train wants it.", cure)
    becoming.put("mode", "both" if file.mode == "colocate" else file.mode)


def _steps(file: TrinityFile, becoming: Becoming) -> None:
    buffer = file.buffer
    if file.mode == "bench":
        return
    for key, value in (("buffer.batch_size", buffer.batch_size), ("buffer.total_epochs", buffer.total_epochs)):
        if value < 1:
            becoming.fault(key, f"{value} is none.", "Set 1 or more.")
            return
    group = file.algorithm.repeat_times or REPEATS.get(file.algorithm.algorithm_type, 2)
    if file.algorithm.algorithm_type in SUPERVISED:
        _ends(file, buffer.total_steps, becoming)
        return
    size = buffer.train_batch_size or buffer.batch_size * group
    if buffer.train_batch_size and _by_turns(file, becoming):
        size = buffer.batch_size * group
        becoming.note(f"buffer.train_batch_size: it counts turns there; here a step learns from all {size} rollouts.")
    if demonstrations.mixed(file):
        size = round(size * (1 - demonstrations.ratio(file)))
    if size % group or size < group:
        cure = f"Set a multiple of algorithm.repeat_times ({group}), or leave it out."
        becoming.fault("buffer.train_batch_size", f"{size} replies of the policy are no whole groups.", cure)
        return
    becoming.put("groups_per_step", size // group)
    asked, drawn = buffer.total_steps, buffer.batch_size
    if file.mode == "train" and "batch_size" not in buffer.model_fields_set:
        drawn = size // group
    _ends(file, None if asked is None else asked * drawn // (size // group), becoming)


def _by_turns(file: TrinityFile, becoming: Becoming) -> bool:
    """Whether Trinity counts every turn of a rollout as one of the training batch, and tasks say how many there are."""
    advantage = becoming.settings.get("algorithm", {}).get("advantage", {}).get("type")
    workflow = becoming.settings.get("workflow", {}).get("type")
    asked = file.mode != "train" or "batch_size" in file.buffer.model_fields_set
    return asked and advantage in ("step_wise_grpo", "gigpo") and workflow not in ("single_turn", "math")


def _ends(file: TrinityFile, asked: int | None, becoming: Becoming) -> None:
    """After so many steps, or else epochs; the trainer's own bound lies over both."""
    if asked is not None and asked < 1:
        cure = "Raise it, or lower buffer.train_batch_size."
        becoming.fault("buffer.total_steps", "with buffer.batch_size it gives less than one step of training.", cure)
        return
    bound = file.trainer.total_steps
    if file.mode == "train" and not (asked or bound) and not _counted(file):
        cure = "Set trainer.total_steps, or give the taskset whose epochs are counted."
        becoming.fault("trainer.total_steps", "nothing says how many steps there are.", cure)
        return
    if asked is None and _counted(file):
        becoming.put("epochs", file.buffer.total_epochs)
    if asked is not None or bound:
        becoming.put("steps", min(one for one in (asked, bound) if one))


def _counted(file: TrinityFile) -> bool:
    """Whether there is data whose epochs can be counted."""
    return file.algorithm.algorithm_type in SUPERVISED or bool(training(file))


def _at_once(file: TrinityFile, becoming: Becoming) -> None:
    runners, engines = file.explorer.runner_per_model, file.explorer.rollout_model.engine_num
    if runners < 1 or engines < 1:
        cure = "Set explorer.runner_per_model and rollout_model.engine_num to 1 or more."
        becoming.fault("explorer.runner_per_model", "nothing would be sampled.", cure)
        return
    becoming.put("concurrency", runners * engines)


def _log(file: TrinityFile, becoming: Becoming) -> None:
    level = file.log.level.upper()
    if level not in LEVELS:
        becoming.fault("log.level", f"there is no '{file.log.level}'.", f"It is one of {', '.join(LEVELS)}.")
    else:
        becoming.put("log_level", level)


def _dtype(file: TrinityFile, becoming: Becoming) -> str:
    """`auto` is bfloat16 wherever the hardware is fast at it."""
    dtypes = {"bfloat16": "auto", "float16": "auto", "auto": "auto", "float32": "float32"}
    given = file.explorer.rollout_model.dtype
    if given not in dtypes:
        cure = f"It is one of {', '.join(dtypes)}."
        becoming.fault("explorer.rollout_model.dtype", f"there is no '{given}'.", cure)
    if given == "float16":
        becoming.note("explorer.rollout_model.dtype: float16 is not served; bfloat16, or float32 where that is slow.")
    return dtypes.get(given, "auto")
