"""rLLM's training: batches, length, learning rate, asynchronous training, evaluation, loggers, checkpoints."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from tinsmith.dialects.base import NOTHING, Translation, combine, did_you_mean, fault, note, settings, translates
from tinsmith.integrations.rllm.files.schema import RllmData, RllmTrainer, RllmTraining
from tinsmith.integrations.rllm.files.schema_unified import (
    AsyncTraining,
    TinkerTraining,
    TinkerValidation,
    UnifiedAlgorithm,
    UnifiedData,
    UnifiedRollout,
    UnifiedTrainer,
)
from tinsmith.integrations.rllm.files.values import (
    BATCH_SIZE,
    EPOCHS,
    EVAL_BEFORE,
    EVAL_EVERY,
    EVAL_SIZE,
    FOLDER,
    GROUP_SIZE,
    LOGGER,
    NAME,
    PROJECT,
    RESUME_FROM,
    SAVE_EVERY,
    SCHEDULE,
    WARMUP_RATIO,
    Values,
    no_effect,
)

GROUP = 8
"""Group size of the unified configuration, if it is not set."""
TRACKERS = ("wandb", "mlflow", "tensorboard", "trackio")
IN_RUN_FOLDER = {"file": "metrics.jsonl", "ui": "report.html"}
"""Loggers -> the file of the run folder that has their contents."""
MISSING_LOGGERS = ("swanlab", "clearml")
SCHEDULES = ("constant", "linear", "cosine")


def translate(values: Values) -> Translation:
    """The settings of the run, `optimizer`, `eval` (when), `monitors` and `checkpoint`."""
    return combine(
        [
            _batches(values),
            _length(values),
            _schedule(values),
            _evaluation(values),
            _monitors(values),
            _folder(values),
            _resume(values),
        ]
    )


@translates(RllmTraining, group_size="group_size")
@translates(UnifiedRollout, n="group_size; null is training.group_size, or 8")
@translates(RllmData, train_batch_size="groups_per_step")
@translates(UnifiedData, train_batch_size="groups_per_step", seed="seed")
def _batches(values: Values) -> Translation:
    size, batch, result = values.setting(*GROUP_SIZE), values.setting(*BATCH_SIZE), NOTHING
    for setting in (size, batch):
        if setting.value is not None and setting.value < 1:
            return fault(setting.key, f"{setting.value} is too few.", "Set 1 or more.")
    if values.has("rllm.backend"):
        result += settings({"seed": max(0, values.value("rllm.data.seed"))}) + _asynchronous(values)
    group = GROUP if size.value is None else size.value
    return settings({"group_size": group, "groups_per_step": batch.value}) + result


@translates(
    AsyncTraining,
    enable="whether the keys below have an effect",
    mini_batch_size="groups_per_step, in place of train_batch_size",
    staleness_threshold="staleness: this times trigger_parameter_sync_step, rounded up to whole batches",
    trigger_parameter_sync_step="sync.interval",
    partial_rollout="sync.style: live, where rollouts in flight take new weights",
)
def _asynchronous(values: Values) -> Translation:
    names = ("mini_batch_size", "staleness_threshold", "trigger_parameter_sync_step", "partial_rollout")
    keys = [f"rllm.async_training.{name}" for name in names]
    batch, threshold, interval, partial = map(values.value, keys)
    if not values.value("rllm.async_training.enable"):
        return no_effect(values.set_keys(*keys), "it has an effect only with enable: true.")
    for key, value, least in ((keys[0], batch, 1), (keys[1], threshold, 0), (keys[2], interval, 1)):
        if value < least:
            return fault(key, f"{value} is too small.", f"Set {least} or more.")
    ahead = math.ceil(threshold * interval)
    result = settings({"groups_per_step": batch})
    if ahead != threshold * interval:
        result += note(f"{keys[1]}: sampling is ahead of training by whole batches, here up to {ahead}.")
    if partial:
        live = {"sync.style": "live", "sync.publish_every": interval, "sync.in_flight": 1 + ahead}
        return result + settings(live)
    high = settings({"allow_high_staleness": True}) if ahead > 8 else settings({})
    return result + settings({"staleness": ahead, "sync.interval": interval}) + high


@translates(RllmTrainer, total_epochs="epochs")
@translates(UnifiedTrainer, total_epochs="epochs", total_batches="steps, if above 0; the smaller number counts")
def _length(values: Values) -> Translation:
    epochs, result = values.setting(*EPOCHS), NOTHING
    if epochs.value <= 0:
        return fault(epochs.key, f"{epochs.value:g} is too few.", "Set more than 0.")
    if values.has("rllm.backend") and (steps := values.value("rllm.trainer.total_batches")) > 0:
        result = settings({"steps": steps})
    return result + settings({"epochs": epochs.value})


@translates(
    UnifiedAlgorithm,
    lr_schedule="optimizer.schedule; it ends at 0 and never falls below",
    warmup_steps="optimizer.warmup_steps, if above 0",
    warmup_steps_ratio="optimizer.warmup_ratio, if warmup_steps is not set",
)
@translates(TinkerTraining, lr_schedule="optimizer.schedule", warmup_steps_ratio="optimizer.warmup_ratio")
def _schedule(values: Values) -> Translation:
    if not values.has("rllm.backend"):
        return NOTHING
    schedule, ratio = values.setting(*SCHEDULE), values.setting(*WARMUP_RATIO)
    if schedule.value not in SCHEDULES:
        return fault(schedule.key, f"there is no '{schedule.value}'.", did_you_mean(schedule.value, SCHEDULES))
    result = settings({"optimizer.schedule": schedule.value})
    steps = values.value("rllm.algorithm.warmup_steps")
    if steps > 0:
        result += settings({"optimizer.warmup_steps": steps})
        unused = f"{ratio.key}: rllm.algorithm.warmup_steps is set as well, and is used."
        return result + (note(unused) if ratio.value else NOTHING)
    if not 0 <= ratio.value < 1:
        return fault(ratio.key, f"{ratio.value:g} is not a share of the run.", "Set 0 or more, and less than 1.")
    return result + (settings({"optimizer.warmup_ratio": ratio.value}) if ratio.value else NOTHING)


@translates(RllmTraining, val_group_size="eval.num_samples")
@translates(UnifiedRollout, n_val="eval.num_samples; null is validation.group_size, or 1")
@translates(TinkerValidation, group_size="eval.num_samples")
@translates(
    RllmTrainer,
    test_freq="eval.every, and after the last step; 0 or less: never",
    val_before_train="eval.before",
)
@translates(
    UnifiedTrainer,
    test_freq="eval.every, and after the last step; 0 or less: never",
    val_before_train="eval.before",
    val_only="mode: bench, of the checkpoint to resume from, or else of the base model and the last one in the folder",
)
def _evaluation(values: Values) -> Translation:
    every, size = max(0, values.value(*EVAL_EVERY)), values.value(*EVAL_SIZE)
    result = settings(
        {
            "eval.every": every,
            "eval.before": values.value(*EVAL_BEFORE),
            "eval.after": every > 0,
            "eval.num_samples": size or 1,
        }
    )
    return result + (
        settings({"mode": "bench"}) if values.has("rllm.backend") and values.value("rllm.trainer.val_only") else NOTHING
    )


@translates(RllmTrainer, logger="monitors, in addition to report; file and ui are files of the run folder")
@translates(UnifiedTrainer, logger="monitors, in addition to report; file and ui are files of the run folder")
def _monitors(values: Values) -> Translation:
    logger = values.setting(*LOGGER)
    names = (logger.value,) if isinstance(logger.value, str) else tuple(logger.value)
    monitors: list[dict[str, Any]] = [{"type": "report"}]
    result = NOTHING
    for name in dict.fromkeys(names):
        if name == "console":
            monitors.insert(0, {"type": "console"})
        elif name in ("wandb", "mlflow", "trackio"):
            monitors.append({"type": name, "project": values.value(*PROJECT), "name": values.value(*NAME)})
        elif name == "tensorboard":
            monitors.append({"type": name})
        elif name in IN_RUN_FOLDER:
            result += note(f"{logger.key}: {name}: see {IN_RUN_FOLDER[name]} in the run folder.")
        elif name in MISSING_LOGGERS:
            fix = f"Use {', '.join(TRACKERS[:-1])} or {TRACKERS[-1]}."
            result += fault(logger.key, f"{name} is not supported.", fix)
        else:
            supported = ("console", *TRACKERS, *IN_RUN_FOLDER)
            result += fault(logger.key, f"there is no logger '{name}'.", did_you_mean(name, supported))
    return result + settings({"monitors": monitors})


@translates(
    RllmTrainer,
    project_name="project of wandb and mlflow; folder",
    experiment_name="name, also in wandb and mlflow; folder",
    default_local_dir="folder; if not set, runs/PROJECT/EXPERIMENT: rLLM's default is one folder for all runs",
    save_freq="checkpoint.every; 0 or less: only at the end",
)
@translates(
    UnifiedTrainer,
    project_name="project of wandb and mlflow; folder",
    experiment_name="name, also in wandb and mlflow; folder",
    save_freq="checkpoint.every; 0 or less: only at the end",
)
@translates(TinkerTraining, default_local_dir="folder")
def _folder(values: Values) -> Translation:
    """`name`, `folder` and `checkpoint`."""
    project, name, folder = values.value(*PROJECT), values.value(*NAME), values.setting(*FOLDER)
    parent = "checkpoints" if values.has("rllm.backend") else "runs"
    return settings(
        {
            "name": name,
            "folder": str(folder.value) if folder.is_set else str(Path(parent) / project / name),
            "checkpoint.every": max(0, values.value(*SAVE_EVERY)),
            "checkpoint.ttl_seconds": None,  # rLLM's checkpoints do not expire
        }
    )


@translates(RllmTrainer, resume_from_tinker_id="resume_from")
@translates(
    TinkerTraining,
    resume_mode="resume: true (auto) or rename (disable); with resume_path, resume_from",
    resume_from_path="resume_from, with resume_mode resume_path: a tinker:// path, or rLLM's folder of a checkpoint",
    resume_from_tinker_id="resume_from",
)
def _resume(values: Values) -> Translation:
    state, result = values.setting(*RESUME_FROM), NOTHING
    path = state.value or ""
    if path and not str(path).startswith("tinker://"):
        fix = "Write it as tinker://RUN/weights/NAME."
        return fault(state.key, f"'{path}' is not a path on the server.", fix)
    if values.has("rllm.backend"):
        other, result = _resume_mode(values)
        path = path or other
    if not path:
        return result
    if values.has("rllm.backend") and values.value("rllm.trainer.val_only"):
        return result + settings({"bench.checkpoints": [path], "bench.base": False})
    return result + settings({"resume_from": path})


def _resume_mode(values: Values) -> tuple[str, Translation]:
    """The path to resume from, or an empty one, and the settings of resume_mode."""
    mode, place = values.value("training.resume_mode"), values.setting("training.resume_from_path")
    if mode not in ("auto", "disable", "resume_path"):
        fix = did_you_mean(mode, ("auto", "disable", "resume_path"))
        return "", fault("training.resume_mode", f"there is no '{mode}'.", fix)
    if mode != "resume_path":
        result = settings({"resume": True if mode == "auto" else "rename"})
        unused = f"{place.key}: it has an effect only with training.resume_mode: resume_path."
        return "", result + (note(unused) if place.is_set else NOTHING)
    if not place.is_set:
        return "", fault(place.key, "it is not set.", "Set it, or set training.resume_mode: auto.")
    if place.value.startswith("tinker://"):
        return place.value, NOTHING
    file = Path(place.value).expanduser() / "checkpoint.json"
    try:
        return str(json.loads(file.read_text(encoding="utf-8"))["state_path"]), NOTHING
    except (OSError, ValueError, KeyError, TypeError):
        fix = "Write a tinker:// path; a run in training.default_local_dir resumes by itself."
        return "", fault(place.key, f"there is no checkpoint {file} with a state_path.", fix)
