"""Translate a whole file of Trinity-RFT into the settings of a run, with notes. All faults are reported together.

This module also translates what concerns the whole run: mode, steps, folder, log, monitors and stages. A stage is a
file of its own, with its sections in place of the file's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tinsmith.dialects.base import (
    NOTHING,
    Dialect,
    Key,
    Translation,
    check_faults,
    combine,
    did_you_mean,
    fault,
    keys,
    note,
    settings,
    translate_declared,
    translates,
)
from tinsmith.dialects.unread import is_unread
from tinsmith.errors import ConfigError
from tinsmith.integrations.trinity.files import algorithm, data, demonstrations, evaluation, model, workflows
from tinsmith.integrations.trinity.files.name_tables import DEFAULT_GROUP_SIZES, SUPERVISED
from tinsmith.integrations.trinity.files.schema import MARKS, Log, TrinityFile
from tinsmith.integrations.trinity.files.schema_buffer import BufferSection
from tinsmith.integrations.trinity.files.schema_runtime import Explorer, Monitor, RolloutModel, Trainer
from tinsmith.integrations.trinity.plugin_shim import plugin_shim
from tinsmith.plurals import counted
from tinsmith.rl.plugins import Names
from tinsmith.settings import build

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
TRACKERS: dict[str, tuple[str, ...]] = {"tensorboard": (), "wandb": ("base_url",), "mlflow": ("uri",)}
"""Trackers, and those of Trinity's arguments that they take."""
SECRETS = {
    "api_key": "Set WANDB_API_KEY in the environment.",
    "username": "Set MLFLOW_TRACKING_USERNAME in the environment.",
    "password": "Set MLFLOW_TRACKING_PASSWORD in the environment.",
}
STAGE_KEYS = ("stage_name", "mode", "algorithm", "buffer", "data_processor", "explorer", "trainer")
LENGTH_KEYS = ("steps", "epochs")
"""Settings that always stand in each stage."""
SHARED_BY_STAGES = {
    ("model", "chat_template"): "chat_template",
    ("model", "chat_template_values"): "enable_thinking",
    ("service", "dtype"): "explorer.rollout_model.dtype",
}
"""Settings of the run's model and service, which all stages share -> Trinity's names."""


def recognizes(values: Mapping[str, Any]) -> bool:
    """Whether the file is Trinity's: it has a section, or a key of a section, that no Tinsmith run file has."""
    marks = {"model": {"model_path"}, "algorithm": {"algorithm_type"}, "buffer": set(BufferSection.model_fields)}
    sections = ((values.get(name), keys) for name, keys in marks.items())
    return not is_unread(values) and (
        not MARKS.isdisjoint(values)
        or any(isinstance(section, Mapping) and not keys.isdisjoint(section) for section, keys in sections)
    )


def file_keys() -> Iterator[Key]:
    """Every key of a file, with its fate."""
    return keys(TrinityFile)


def defaults() -> dict[str, Any]:
    """The values that references (`${…}`) find where the file does not set the key."""
    return TrinityFile().model_dump(mode="json")


def translate(
    values: Mapping[str, Any], place: str, plugins: Names = frozenset(), overrides: Sequence[str] = ()
) -> Translation:
    """The settings and notes of a file; `overrides` are the words that set some of its values.

    `plugins` are the names that the plugin folder registers. Raises ConfigError with every fault.
    """
    file = build(TrinityFile, values, place, overrides)
    if file.stages:
        return _stages(values, file, place, plugins)
    return check_faults(_translate_file(file, plugins), place)


def _translate_file(file: TrinityFile, plugins: Names) -> Translation:
    """A file without stages."""
    strategy = demonstrations.sample_strategy(file)
    workflow = workflows.translate(file, plugins)
    workflow_type = workflow.settings.get("workflow", {}).get("type", "")
    training = combine([translate_declared(file), model.translate(file), data.translate(file), workflow])
    length = _length(file, workflow_type)
    minibatches = length.settings.get("updates", {}).get("minibatches", 1)
    whole = combine(
        [
            training,
            algorithm.translate(file, workflow_type),
            algorithm.old_logprobs(file, training.settings.get("sampling", {})),
            strategy.translation,
            data.rollout_buffer(file, strategy.max_staleness),
            evaluation.translate(file, plugins, training.settings),
            _mode(file),
            length,
            _folder(file),
            _log(file),
            _concurrency(file),
            _dtype(file),
            model.rollouts(file),
            model.synchronization(file, minibatches),
            model.epochs_of_batches(file),
            data.operators(file),
            _monitors(file),
        ]
    )
    return _in_steps(whole, file, minibatches) if minibatches > 1 else whole


def _in_steps(whole: Translation, file: TrinityFile, minibatches: int) -> Translation:
    """The translation with Trinity's training steps, of one minibatch each, counted in steps of the run, rounded up."""
    counted = {
        "checkpoint.every": file.trainer.save_interval,
        "optimizer.warmup_steps": max(0, file.algorithm.optimizer.lr_warmup_steps),
    }
    if "critic" in whole.settings.get("algorithm", {}):
        counted["algorithm.critic.warmup_steps"] = file.trainer.critic_warmup
    in_steps = {key: -(-number // minibatches) for key, number in counted.items() if number > 0}
    text = (
        f"buffer.train_batch_size: a step of the run is {minibatches} training steps of Trinity, each on a minibatch. "
        "trainer.total_steps, save_interval and warm-ups count these; the learning rate changes from step to step."
    )
    return whole + settings(in_steps) + note(text)


@translates(
    TrinityFile, mode="mode: both (colocate too), explore, train, bench; serve is a separate command, tinsmith serve"
)
def _mode(file: TrinityFile) -> Translation:
    name, explorer = file.algorithm.algorithm_type, file.explorer
    if file.mode == "serve":
        base_model = file.model.tinker.base_model or file.model.model_path or "NAME"
        command = f"tinsmith serve --model {base_model} --host {explorer.listen_address} --port {explorer.proxy_port}"
        problem = "serving is a separate command, with the OpenAI API beside the Tinker API."
        return fault("mode", problem, f"Use: {command}")
    result = settings({"mode": "both" if file.mode == "colocate" else file.mode}) + _explorer(file)
    if name in SUPERVISED and file.mode not in ("train", "bench"):
        result += fault("mode", f"{name} trains on demonstrations, not on rollouts.", "Set mode: train.")
    if file.mode == "train" and not file.buffer.train_batch_size:
        fix = "Set it to the number of replies in a training step."
        result += fault("buffer.train_batch_size", "mode train needs it.", fix)
    return result


@translates(Explorer, name="sampler, in mode explore; the default name is no name")
def _explorer(file: TrinityFile) -> Translation:
    """The name of a process of mode explore, of which several may sample for one run."""
    name = file.explorer.name
    if name == Explorer().name:
        return NOTHING
    if file.mode != "explore":
        return note("explorer.name: it has an effect only in mode explore.")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,29}", name):
        return fault("explorer.name", f"'{name}' is part of names of files.", "Use letters, digits, _ and -, up to 30.")
    return settings({"sampler": name})


@translates(
    BufferSection,
    batch_size="groups_per_step",
    train_batch_size="updates.minibatches: batch_size x repeat_times divided by this; groups_per_step, divided by "
    "repeat_times, where it is more or there is no batch_size; no effect where Trinity counts turns",
)
def _length(file: TrinityFile, workflow_type: str) -> Translation:
    """`groups_per_step`, `steps` and `epochs`."""
    buffer, result = file.buffer, NOTHING
    if file.mode == "bench":
        return result
    for key, value in (("buffer.batch_size", buffer.batch_size), ("buffer.total_epochs", buffer.total_epochs)):
        if value < 1:
            return fault(key, f"{value} is too few.", "Set 1 or more.")
    if file.algorithm.algorithm_type in SUPERVISED:
        return _steps(file, buffer.total_steps)
    group = file.algorithm.repeat_times or DEFAULT_GROUP_SIZES.get(file.algorithm.algorithm_type, 2)
    size = buffer.train_batch_size or buffer.batch_size * group
    if buffer.train_batch_size and _counts_turns(file, workflow_type):
        size = buffer.batch_size * group
        result += note(
            f"buffer.train_batch_size: it counts turns there; here a step trains on all {counted(size, 'rollout')}."
        )
    if demonstrations.is_mixed(file):
        size = demonstrations.batch_shares(file).policy
    if size % group or size < group:
        fix = f"Set a multiple of algorithm.repeat_times ({group}), or leave it out."
        return result + fault("buffer.train_batch_size", f"{size} replies of the policy are not whole groups.", fix)
    groups = size // group
    sampled = buffer.batch_size if file.mode != "train" or "batch_size" in buffer.model_fields_set else groups
    if groups < sampled and not demonstrations.is_mixed(file):
        if sampled % groups:
            fix = f"Set a divisor of batch_size x repeat_times ({sampled * group}), or leave it out."
            return result + fault("buffer.train_batch_size", f"{size} replies do not divide a batch evenly.", fix)
        result += settings({"groups_per_step": sampled, "updates.minibatches": sampled // groups})
        return result + _steps(file, buffer.total_steps, sampled // groups)
    result += settings({"groups_per_step": groups})
    return result + _steps(file, None if buffer.total_steps is None else buffer.total_steps * sampled // groups)


def _counts_turns(file: TrinityFile, workflow_type: str) -> bool:
    """Whether Trinity counts turns in a training batch, and the batch of tasks gives the number of rollouts."""
    has_tasks = file.mode != "train" or "batch_size" in file.buffer.model_fields_set
    by_turn = algorithm.advantage_type(file) in ("step_wise_grpo", "gigpo")
    return has_tasks and by_turn and workflow_type not in ("single_turn", "math")


@translates(BufferSection, total_epochs="epochs", total_steps="steps")
@translates(Trainer, total_steps="steps, where it is less than the data gives")
def _steps(file: TrinityFile, steps: int | None, minibatches: int = 1) -> Translation:
    """The number of steps, or else epochs; trainer.total_steps bounds either."""
    if steps is not None and steps < 1:
        fix = "Raise it, or lower buffer.train_batch_size."
        return fault("buffer.total_steps", "with buffer.batch_size it gives less than one step of training.", fix)
    bound = file.trainer.total_steps and max(1, file.trainer.total_steps // minibatches)
    has_epochs = file.algorithm.algorithm_type in SUPERVISED or bool(data.training_tasksets(file))
    if file.mode == "train" and not (steps or bound or has_epochs):
        fix = "Set trainer.total_steps, or give the taskset whose epochs are counted."
        return fault("trainer.total_steps", "no key gives the number of steps.", fix)
    result = NOTHING
    if steps is None and has_epochs:
        result += settings({"epochs": file.buffer.total_epochs})
    limits = [limit for limit in (steps, bound) if limit]
    return result + (settings({"steps": min(limits)}) if limits else NOTHING)


@translates(
    TrinityFile,
    project="folder: checkpoint_root_dir/project/group/name",
    group="folder",
    name="name, folder",
    checkpoint_root_dir="folder",
    continue_from_checkpoint="resume; false is rename, as in Trinity",
)
@translates(RolloutModel, seed="seed; each request derives its own from it")
def _folder(file: TrinityFile) -> Translation:
    """Name, folder and seed of the run."""
    return settings(
        {
            "name": file.name,
            "resume": True if file.continue_from_checkpoint else "rename",
            "folder": str(Path(file.checkpoint_root_dir) / file.project / file.group / file.name),
            "seed": max(0, file.explorer.rollout_model.seed),
            "checkpoint.ttl_seconds": None,  # Trinity's checkpoints do not expire
        }
    )


@translates(Log, level="log_level: of log.txt in the run folder")
def _log(file: TrinityFile) -> Translation:
    level = file.log.level.upper()
    if level in LOG_LEVELS:
        return settings({"log_level": level})
    return fault("log.level", f"there is no '{file.log.level}'.", f"It is one of {', '.join(LOG_LEVELS)}.")


@translates(Explorer, runner_per_model="rollout.concurrency: this times rollout_model.engine_num")
@translates(RolloutModel, engine_num="rollout.concurrency: runner_per_model times this")
def _concurrency(file: TrinityFile) -> Translation:
    runners, engines = file.explorer.runner_per_model, file.explorer.rollout_model.engine_num
    if runners < 1 or engines < 1:
        fix = "Set explorer.runner_per_model and rollout_model.engine_num to 1 or more."
        return fault("explorer.runner_per_model", "nothing would be sampled.", fix)
    return settings({"rollout.concurrency": runners * engines})


@translates(RolloutModel, dtype="service.dtype; bfloat16 is auto: bfloat16 where the hardware supports it natively")
def _dtype(file: TrinityFile) -> Translation:
    key, rollout = "explorer.rollout_model.dtype", file.explorer.rollout_model
    if "dtype" not in rollout.model_fields_set:
        return NOTHING
    if file.model.tinker.enable:
        return note(f"{key}: with model.tinker the server decides.")
    dtypes = {"bfloat16": "auto", "float16": "auto", "auto": "auto", "float32": "float32"}
    if rollout.dtype not in dtypes:
        return fault(key, f"there is no '{rollout.dtype}'.", f"It is one of {', '.join(dtypes)}.")
    result = settings({"service.dtype": dtypes[rollout.dtype]})
    if rollout.dtype == "float16":
        result += note(f"{key}: float16 is not supported; bfloat16 is used, or float32 where bfloat16 is slow.")
    return result


@translates(
    Monitor,
    monitor_type="monitors, in addition to console and report; if not set, these two only. swanlab is refused",
    monitor_args="monitors; keys and passwords come from the environment",
)
def _monitors(file: TrinityFile) -> Translation:
    """`monitors`, with Trinity's names of metrics."""
    section, key = file.monitor, "monitor.monitor_type"
    kind = section.monitor_type
    if kind == "swanlab":
        fix = "Use tensorboard, mlflow, or wandb (WANDB_MODE=offline needs no account)."
        return fault(key, "swanlab is not supported.", fix)
    if kind not in TRACKERS:
        return fault(key, f"there is no '{kind}'.", did_you_mean(kind, TRACKERS))
    if not section.model_fields_set & {"monitor_type", "monitor_args"}:
        return NOTHING
    tracker: dict[str, Any] = {"type": kind, "names": "trinity"}
    if kind != "tensorboard":
        tracker |= {"project": file.project, "group": file.group, "name": file.name}
    result = NOTHING
    for name, value in (section.monitor_args or {}).items():
        place = f"monitor.monitor_args.{name}"
        if name in SECRETS:
            result += fault(place, "it is a secret, and a run stores its settings in files.", SECRETS[name])
        elif name not in TRACKERS[kind]:
            fix = f"Known here: {', '.join(TRACKERS[kind]) or 'none'}."
            result += fault(place, "there is no such argument.", fix)
        else:
            tracker[name] = value
    return result + settings({"monitors": [{"type": "console"}, {"type": "report"}, tracker]})


@translates(
    TrinityFile,
    stages="stages: sections in place of the file's; each stage starts from the weights of the one before, with a "
    "fresh optimizer; all share one chat template and one precision",
)
def _stages(values: Mapping[str, Any], file: TrinityFile, place: str, plugins: Names) -> Translation:
    """A run in stages. Raises ConfigError with the faults of every stage."""
    stages: list[tuple[str, Translation]] = []
    faults: list[str] = []
    for index, stage in enumerate(file.stages):
        name = str(stage.get("stage_name") or "")
        if not name:
            faults.append(f"{place}: 'stages[{index}].stage_name': it is not set. Name each stage.")
        if unknown := [key for key in stage if key not in STAGE_KEYS]:
            fix = did_you_mean(unknown[0], STAGE_KEYS)
            faults.append(f"{place}: 'stages[{index}].{unknown[0]}': there is no such key. {fix}")
            continue
        sections = {key: section for key, section in stage.items() if key != "stage_name" and section is not None}
        whole = {**{key: section for key, section in values.items() if key != "stages"}, **sections}
        stage_place = f"{place}, stage {name}"
        try:
            translation = _translate_file(build(TrinityFile, whole, stage_place), plugins)
            stages.append((name, check_faults(translation, stage_place)))
        except ConfigError as error:
            faults.append(str(error))
    if faults:
        raise ConfigError("\n".join(faults))
    shared = _shared_settings(stages, place)
    return _joined([(name, stage + Translation(shared.settings)) for name, stage in stages], shared.notes)


def _shared_settings(stages: Sequence[tuple[str, Translation]], place: str) -> Translation:
    """The settings that all stages share, with notes. Raises ConfigError where two stages differ."""
    result = NOTHING
    for (section, key), word in SHARED_BY_STAGES.items():
        own = [(name, stage.settings.get(section, {})) for name, stage in stages]
        values_set = [(name, values[key]) for name, values in own if key in values]
        if not values_set:
            continue
        first, value = values_set[0]
        for name, other in values_set:
            if other != value:
                fix = f"Make them alike: all stages share one model at one service, and stage {first} has another."
                result += Translation(faults=(f"stage {name}: '{word}': the stages differ. {fix}",))
        if len(values_set) < len(stages):
            text = f"{word}: all stages use that of stage {first}, because they share one model at one service."
            result += note(text)
        result += settings({f"{section}.{key}": value})
    return check_faults(result, place)


def _joined(stages: Sequence[tuple[str, Translation]], notes: Sequence[str]) -> Translation:
    """One run: settings that are equal in all stages stand in the run, and others in each stage."""
    first, all_settings = stages[0][1].settings, [stage.settings for _, stage in stages]
    shared = {
        key: value
        for key, value in first.items()
        if key not in LENGTH_KEYS and all(key in other and other[key] == value for other in all_settings)
    }
    own = [
        {"name": name, **{key: value for key, value in stage.settings.items() if key not in shared}}
        for name, stage in stages
    ]
    result = Translation({**shared, "stages": own}, tuple(notes))
    for name, stage in stages:
        for text in stage.notes:
            in_all = all(text in other.notes for _, other in stages)
            result += note(text if in_all else f"stage {name}: {text}")
    return result


DIALECT = Dialect(
    name="Trinity-RFT",
    guide="docs/from/trinity.md",
    schema=TrinityFile,
    recognizes=recognizes,
    translate=translate,
    stage_keys=STAGE_KEYS,
    defaults=defaults,
    plugin_imports=plugin_shim,
    api_key_env="TRINITY_API_KEY",
)
