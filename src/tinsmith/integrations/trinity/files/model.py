"""Trinity's `model` and `synchronizer` sections: model, adapter, server, lengths and weight synchronisation.

The adapter is that of `model.tinker` where it is enabled, else that of the first entry of `model.lora_configs`.

Synchronisation interval and offset mean the same as in Trinity: with interval i and offset o, batch k is sampled by the
weights of step floor((k - 1 - o) / i) i. Without `sync.method`, weights are passed in memory within one process, and as
checkpoints between two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tinsmith.dialects.base import NOTHING, Translation, combine, fault, note, note_unused, settings, translates
from tinsmith.integrations.trinity.files.name_tables import SUPERVISED
from tinsmith.integrations.trinity.files.schema import TrinityFile
from tinsmith.integrations.trinity.files.schema_buffer import ExperienceBuffer, TaskFormat
from tinsmith.integrations.trinity.files.schema_runtime import (
    DynamicTimeout,
    Explorer,
    LoraConfig,
    ModelSection,
    OverRollout,
    RolloutModel,
    Synchronizer,
    TinkerSection,
    Trainer,
)
from tinsmith.plurals import counted

ALPHA = 32
"""LoRA's alpha on the Tinker API, a constant: W' = W + (32 / rank) B A."""
STYLES = {
    "fixed": "fixed",
    "explorer_driven": "on_demand",
    "trainer_driven": "on_publish",
    "fully_async": "live",
}
PUBLISHING = ("trainer_driven", "fully_async")
"""Styles in which the trainer publishes weights at its own interval."""


@translates(
    ModelSection,
    model_path="model.name",
    critic_model_path="a second adapter on the same base model; other models are refused",
)
@translates(TinkerSection, base_model="model.name; null is model.model_path")
def translate(file: TrinityFile) -> Translation:
    """`model`, and the lengths in `sampling`."""
    section = file.model
    name = section.tinker.base_model or section.model_path
    result = settings({"model.name": name})
    if not name:
        result += fault("model.model_path", "it is not set.", "Name the base model as the server names it.")
    if section.critic_model_path not in ("", name):
        problem = f"the critic is a second adapter on {name or 'the base model'}."
        result += fault("model.critic_model_path", problem, "Leave it out, or name the same model.")
    adapter = _tinker_adapter(file) if section.tinker.enable else _lora_adapter(file)
    return result + adapter + _thinking(file) + _chat_template(file) + _lengths(file)


@translates(
    TinkerSection,
    enable="whether model.tinker or model.lora_configs defines the adapter",
    base_url="model.base_url",
    rank="model.rank",
    seed="model.seed",
    train_attn="model.train_attn",
    train_mlp="model.train_mlp",
    train_unembed="model.train_unembed",
)
def _tinker_adapter(file: TrinityFile) -> Translation:
    tinker, result = file.model.tinker, NOTHING
    if file.model.lora_configs:
        result += note("model.lora_configs: ignored; model.tinker.enable is true, so model.tinker defines the adapter.")
    if tinker.base_url:
        result += settings({"model.base_url": tinker.base_url})
    result += settings({"model.rank": tinker.rank})
    if tinker.seed is not None:
        result += settings({"model.seed": tinker.seed})
    result += settings(
        {f"model.{part}": tinker.__dict__[part] for part in ("train_attn", "train_mlp", "train_unembed")}
    )
    if "rank" not in tinker.model_fields_set:
        result += note(f"model.tinker.rank is not set: {tinker.rank}, as documented (Trinity 0.6.0 itself uses 16).")
    return result


@translates(ModelSection, lora_configs="the adapter: that of the first entry, unless model.tinker.enable is true")
def _lora_adapter(file: TrinityFile) -> Translation:
    """The adapter of a service of the run's own. Full-weight training is not supported."""
    tinker = file.model.tinker.model_copy()
    tinker.model_fields_set.discard("enable")
    unused = note_unused(tinker, "model.tinker.", "it has an effect only with model.tinker.enable: true.")
    loras = file.model.lora_configs
    if file.mode == "bench" and not loras:
        return unused  # nothing is trained
    if loras is None or len(loras) == 0:
        fix = "Add lora_configs: [{lora_rank: 32}], or model.tinker: {enable: true}."
        return unused + fault("model.lora_configs", "training all weights of a model is not supported.", fix)
    if len(loras) > 1:
        unused += fault("model.lora_configs", f"{len(loras)} adapters; a run trains one.", "Keep one.")
    return unused + _lora(loras[0])


@translates(
    LoraConfig,
    path="model.load_from, for a tinker:// path; other paths are refused",
    lora_rank="model.rank",
    lora_alpha="32, the constant of the Tinker API; other values are refused",
    target_modules="model.train_attn and model.train_mlp, for all-linear; other values are refused",
)
def _lora(lora: LoraConfig) -> Translation:
    key, result = "model.lora_configs[0]", NOTHING
    if lora.lora_alpha != ALPHA:
        fix = f"Set {ALPHA}, and change the learning rate in proportion."
        result += fault(f"{key}.lora_alpha", f"alpha is {ALPHA} on the Tinker API, not {lora.lora_alpha}.", fix)
    if lora.target_modules != "all-linear":
        fix = "Use all-linear, or model.tinker with train_attn, train_mlp, train_unembed."
        result += fault(f"{key}.target_modules", "single modules cannot be chosen.", fix)
    if lora.path and lora.path.startswith("tinker://"):
        if "lora_rank" in lora.model_fields_set:
            result += note(f"{key}.lora_rank: the checkpoint at path has its own rank.")
        return result + settings({"model.load_from": lora.path})
    if lora.path:
        fix = "Upload it as a checkpoint, and set its tinker:// path."
        result += fault(f"{key}.path", f"'{lora.path}' is not a path on the server.", fix)
    # PEFT's all-linear excludes the output layer.
    return result + settings({"model.rank": lora.lora_rank, "model.train_unembed": False})


@translates(ModelSection, enable_thinking="model.chat_template_values.enable_thinking")
@translates(RolloutModel, enable_thinking="model.chat_template_values.enable_thinking, in place of model's")
@translates(TaskFormat, enable_thinking="model.chat_template_values.enable_thinking; a run has one value")
def _thinking(file: TrinityFile) -> Translation:
    rollout = file.explorer.rollout_model.enable_thinking
    if rollout is not None:
        values: dict[str, Any] = {"explorer.rollout_model.enable_thinking": rollout}
    else:
        values = {"model.enable_thinking": file.model.enable_thinking}
    values |= {f"{key}.enable_thinking": form.enable_thinking for key, form in _formats(file)}
    return _single_value("model.chat_template_values.enable_thinking", values)


@translates(
    ModelSection,
    custom_chat_template="model.chat_template",
    chat_template_path="model.chat_template, read from the file",
)
@translates(RolloutModel, chat_template="model.chat_template, in place of model's")
@translates(TaskFormat, chat_template="model.chat_template; a run has one")
def _chat_template(file: TrinityFile) -> Translation:
    section, rollout = file.model, file.explorer.rollout_model
    if section.chat_template_path:
        path = Path(section.chat_template_path).expanduser()
        if not path.is_file():
            return fault("model.chat_template_path", f"there is no file {path}.", "Check the path.")
        return settings({"model.chat_template": path.read_text(encoding="utf-8")})
    templates = {"model.custom_chat_template": rollout.chat_template or section.custom_chat_template}
    templates |= {f"{key}.chat_template": form.chat_template for key, form in _formats(file)}
    return _single_value("model.chat_template", templates)


def _formats(file: TrinityFile) -> Iterator[tuple[str, TaskFormat]]:
    """The formats of all tasksets and buffers, with their keys."""
    tasks, buffers = file.buffer.explorer_input, file.buffer.trainer_input
    for name, tasksets in (("tasksets", tasks.tasksets), ("eval_tasksets", tasks.eval_tasksets)):
        yield from ((f"buffer.explorer_input.{name}[{at}].format", entry.format) for at, entry in enumerate(tasksets))
    if tasks.taskset is not None:
        yield "buffer.explorer_input.taskset.format", tasks.taskset.format
    named: dict[str, ExperienceBuffer] = {
        f"auxiliary_buffers.{name}": buffer for name, buffer in buffers.auxiliary_buffers.items()
    }
    if buffers.experience_buffer is not None:
        named["experience_buffer"] = buffers.experience_buffer
    yield from ((f"buffer.trainer_input.{name}.format", buffer.format) for name, buffer in named.items())


def _single_value(to: str, values: Mapping[str, Any]) -> Translation:
    """The value of those keys that are set; a run has one value for all of them."""
    present = {key: value for key, value in values.items() if value not in (None, "")}
    if not present:
        return NOTHING
    first = next(iter(present.values()))
    return settings({to: first}) + combine(
        fault(key, "another key sets a different value, and a run has one.", "Make them alike, or set it once.")
        for key, value in present.items()
        if value != first
    )


@translates(
    ModelSection,
    max_model_len="checked; bounds sampling.max_tokens where max_response_tokens is not set",
    max_prompt_tokens="sampling.max_prompt_tokens",
    max_response_tokens="sampling.max_tokens",
)
@translates(
    RolloutModel,
    max_model_len="in place of model's",
    max_prompt_tokens="in place of model's",
    max_response_tokens="in place of model's",
    ignore_eos="sampling.stop: only max_tokens ends a reply",
)
def _lengths(file: TrinityFile) -> Translation:
    model, rollout = file.model, file.explorer.rollout_model
    prompt = rollout.max_prompt_tokens or model.max_prompt_tokens
    reply = rollout.max_response_tokens or model.max_response_tokens
    total = rollout.max_model_len or model.max_model_len
    for key, value in (("max_prompt_tokens", prompt), ("max_response_tokens", reply), ("max_model_len", total)):
        if value is not None and value < 1:
            return fault(f"model.{key}", f"{value} is not a length.", "Set 1 or more.")
    result, bound = NOTHING, "model.max_model_len"
    if prompt and reply and total and prompt + reply > total:
        problem = f"max_prompt_tokens + max_response_tokens ({prompt} + {reply}) is more than max_model_len ({total})."
        result += fault(bound, problem, f"Raise it to {prompt + reply}, or lower one of the others.")
    if reply is None:
        if total is None:
            fix = "Set model.max_response_tokens, or model.max_model_len."
            return result + fault(bound, "no key bounds the length of a reply.", fix)
        reply = total - (prompt or 0)
        if reply < 1:
            fix = "Lower max_prompt_tokens, or raise max_model_len."
            return result + fault("model.max_prompt_tokens", f"{prompt} uses up max_model_len {total}.", fix)
    result += settings({"sampling.max_tokens": reply})
    if prompt is not None:
        result += settings({"sampling.max_prompt_tokens": prompt})
    return result + (settings({"sampling.stop": []}) if rollout.ignore_eos else NOTHING)


@translates(
    Synchronizer,
    sync_method="sync.method, for checkpoint; nccl and memory leave the choice to Tinsmith",
    sync_style="sync.style: fixed, on_demand (explorer_driven), on_publish (trainer_driven), live (fully_async)",
    sync_offset="staleness; no effect with sync_style fully_async",
    sync_timeout="sync.timeout",
)
@translates(Explorer, max_inflight_batches="sync.in_flight, with sync_style fully_async")
@translates(ExperienceBuffer, max_read_timeout="sync.timeout, in mode train")
def synchronization(file: TrinityFile, minibatches: int) -> Translation:
    """`sync` and `staleness`; a step of the run has `minibatches` training steps of Trinity."""
    sync, name = file.synchronizer, file.algorithm.algorithm_type
    if name in SUPERVISED:
        return note_unused(sync, "synchronizer.", f"{name} trains on demonstrations and samples nothing.")
    result = _intervals(sync, minibatches)
    if sync.sync_offset < 0:
        result += fault("synchronizer.sync_offset", f"{sync.sync_offset} is below 0.", "Set 0 or more.")
    result += settings({"sync.style": STYLES[sync.sync_style], "sync.timeout": _timeout(file)})
    if sync.sync_style == "fully_async":
        result += settings({"sync.in_flight": file.explorer.max_inflight_batches})
        if sync.sync_offset:
            why = "with sync_style fully_async, capacity bounds how far sampling runs ahead."
            result += note(f"synchronizer.sync_offset: {why}")
    else:
        result += settings({"staleness": max(0, sync.sync_offset)})
        if sync.sync_offset > 8:
            result += settings({"allow_high_staleness": True})
        if "max_inflight_batches" in file.explorer.model_fields_set:
            result += note("explorer.max_inflight_batches: it has an effect only with sync_style fully_async.")
    if sync.sync_method == "checkpoint":
        result += settings({"sync.method": "checkpoint"})
    if sync.sync_timeout <= 0:
        problem = f"{sync.sync_timeout} seconds is not a timeout."
        result += fault("synchronizer.sync_timeout", problem, "Set 1 or more.")
    return result


def _timeout(file: TrinityFile) -> float:
    """In mode train, the buffer's timeout for reads counts, if it is set."""
    buffer = file.buffer.trainer_input.experience_buffer
    if file.mode == "train" and buffer is not None and "max_read_timeout" in buffer.model_fields_set:
        return buffer.max_read_timeout
    return file.synchronizer.sync_timeout


@translates(
    Synchronizer,
    sync_interval="sync.interval, sync.publish_every",
    explorer_sync_interval="sync.interval",
    trainer_sync_interval="sync.publish_every",
)
def _intervals(sync: Synchronizer, minibatches: int) -> Translation:
    sampling = sync.sync_interval if sync.explorer_sync_interval is None else sync.explorer_sync_interval
    training = sync.sync_interval if sync.trainer_sync_interval is None else sync.trainer_sync_interval
    intervals = {
        "sync_interval": sync.sync_interval,
        "explorer_sync_interval": sampling,
        "trainer_sync_interval": training,
    }
    invalid = [(key, value) for key, value in intervals.items() if value < 1 and key in sync.model_fields_set]
    if invalid:
        return combine(
            fault(f"synchronizer.{key}", f"{value} is not an interval.", "Set 1 or more.") for key, value in invalid
        )
    result = settings({"sync.interval": sampling})
    if training == sampling * minibatches:
        return result
    if minibatches > 1 and training % minibatches:
        result += note(
            "synchronizer: Trinity also sends weights between the training steps of a batch; here they are sent after "
            "whole batches."
        )
        training = -(-training // minibatches) * minibatches
    training //= minibatches
    if training == sampling:
        return result
    if sync.sync_style in PUBLISHING:
        return result + settings({"sync.publish_every": training})
    key = "synchronizer.trainer_sync_interval"
    if sync.sync_style == "fixed":
        waits = f"the sampler waits for weights every {counted(sampling, 'step')}"
        problem = f"{waits}, and the trainer sends them every {training}."
        return result + fault(key, problem, "Make them alike, or use another sync_style.")
    return result + note(f"{key}: with sync_style explorer_driven, the sampler decides when it takes weights.")


EPOCHS = ("actor_rollout_ref", "actor", "ppo_epochs")


@translates(Trainer, trainer_config="updates.epochs: its actor_rollout_ref.actor.ppo_epochs; the rest has no effect")
def epochs_of_batches(file: TrinityFile) -> Translation:
    """`updates.epochs`; only verl reads it, and the rest of trainer_config says how the trainer shards the model."""
    key, rest, value = "trainer.trainer_config", dict(file.trainer.trainer_config), file.trainer.trainer_config
    for name in EPOCHS:
        value = value.get(name) if isinstance(value, dict) else None
    if not rest:
        return NOTHING
    why = "Trinity's trainer for Tinker does not read it." if file.model.tinker.enable else ""
    if value is None or why:
        return note(f"{key}: {why or 'the server decides how it shards and trains its models.'}")
    if not isinstance(value, int) or value < 1:
        return fault(f"{key}.{'.'.join(EPOCHS)}", f"{value} is not a number of epochs.", "Set 1 or more.")
    return settings({"updates.epochs": value}) + note(f"{key}: only ppo_epochs has an effect.")


@translates(
    OverRollout,
    wait_after_min="rollout.over.wait, with a ratio",
    return_partial_tasks="rollout.over.partial, with a ratio; rollout.partial: keep",
)
@translates(
    DynamicTimeout,
    enable="rollout.timeout_ratio, which is 0 without it",
    ratio="rollout.timeout_ratio",
    warmup_min_steps="rollout.timeout_warmup, with enable: true",
)
def rollouts(file: TrinityFile) -> Translation:
    """`rollout`: timeouts, and rollouts sampled in excess."""
    over, limit, result = file.explorer.over_rollout, file.explorer.dynamic_timeout, NOTHING
    if not 0 <= over.ratio < 1:
        problem = f"{over.ratio} is not a share."
        result += fault("explorer.over_rollout.ratio", problem, "Set 0 or more, and less than 1.")
    if file.synchronizer.sync_style == "fixed" and (over.ratio or over.return_partial_tasks):
        fix = "Set synchronizer.sync_style: explorer_driven or trainer_driven, or leave over_rollout out."
        result += fault("explorer.over_rollout", "sync_style fixed waits for every task.", fix)
    if over.ratio:
        result += settings(
            {"rollout.over.wait": over.wait_after_min, "rollout.over.partial": over.return_partial_tasks}
        )
    elif "wait_after_min" in over.model_fields_set:
        result += note("explorer.over_rollout.wait_after_min: it has an effect only with a ratio above 0.")
    result += settings({"rollout.partial": "keep" if over.return_partial_tasks else "drop"})
    if limit.enable:
        result += settings({"rollout.timeout_ratio": limit.ratio, "rollout.timeout_warmup": limit.warmup_min_steps})
    elif limit.model_fields_set - {"enable"}:
        result += note("explorer.dynamic_timeout: it has an effect only with enable: true.")
    return result
