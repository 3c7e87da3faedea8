"""Trinity's `model` section as ours: base model, adapter, server, chat template; and what bounds lengths.

The adapter is that of model.tinker where it is enabled, else that of the first of model.lora_configs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tinsmith.dialects.base import Becoming, idle
from tinsmith.dialects.trinity.schema import TrinityFile
from tinsmith.dialects.trinity.schema_buffer import Format
from tinsmith.dialects.trinity.schema_runtime import Lora

ALPHA = 32
"""Constant on the Tinker API: W' = W + (32 / rank) B A."""


def translate(file: TrinityFile, becoming: Becoming) -> None:
    """`model`, and the lengths in `sampling`."""
    section = file.model
    name = section.tinker.base_model or section.model_path
    if not name:
        becoming.fault("model.model_path", "it is not set.", "Name the base model as the server names it.")
    becoming.put("model.name", name)
    if section.critic_model_path not in ("", name):
        what = f"the critic is a second adapter on {name or 'the model'} itself."
        becoming.fault("model.critic_model_path", what, "Leave it out, or name the same model.")
    if section.tinker.enable:
        _by_tinker(file, becoming)
    else:
        _by_lora(file, becoming)
    _template(file, becoming)
    _lengths(file, becoming)


def _by_tinker(file: TrinityFile, becoming: Becoming) -> None:
    tinker = file.model.tinker
    if file.model.lora_configs:
        becoming.note("model.lora_configs: ignored, as model.tinker.enable is true; model.tinker makes the adapter.")
    if tinker.base_url:
        becoming.put("model.base_url", tinker.base_url)
    becoming.put("model.rank", tinker.rank)
    if tinker.seed is not None:
        becoming.put("model.seed", tinker.seed)
    for part in ("train_attn", "train_mlp", "train_unembed"):
        becoming.put(f"model.{part}", tinker.__dict__[part])
    if "rank" not in tinker.model_fields_set:
        becoming.note(f"model.tinker.rank is not set: {tinker.rank}, as documented (Trinity 0.6.0 itself takes 16).")


def _by_lora(file: TrinityFile, becoming: Becoming) -> None:
    """Trained by a service of its own with the rank of the LoRA; all of the model is not trained by anyone here."""
    tinker = file.model.tinker.model_copy()
    tinker.model_fields_set.discard("enable")
    idle(tinker, becoming, "model.tinker.", "it counts only with model.tinker.enable: true.")
    loras = file.model.lora_configs
    if loras is None or len(loras) == 0:
        cure = "Add lora_configs: [{lora_rank: 32}], or model.tinker: {enable: true}."
        becoming.fault("model.lora_configs", "training all weights of a model is not possible here.", cure)
        return
    if len(loras) > 1:
        becoming.fault("model.lora_configs", f"{len(loras)} adapters; a run trains one.", "Leave one.")
    _lora(loras[0], becoming)


def _lora(lora: Lora, becoming: Becoming) -> None:
    key = "model.lora_configs[0]"
    if lora.lora_alpha != ALPHA:
        cure = f"Set {ALPHA}, and change the learning rate in proportion."
        becoming.fault(f"{key}.lora_alpha", f"alpha is {ALPHA} on the Tinker API, not {lora.lora_alpha}.", cure)
    if lora.target_modules != "all-linear":
        cure = "Use all-linear, or model.tinker with train_attn, train_mlp, train_unembed."
        becoming.fault(f"{key}.target_modules", "single modules cannot be named.", cure)
    if lora.path and lora.path.startswith("tinker://"):
        becoming.put("model.load_from", lora.path)
        if "lora_rank" in lora.model_fields_set:
            becoming.note(f"{key}.lora_rank: the checkpoint of path has its own.")
        return
    if lora.path:
        cure = "Upload it as a checkpoint, and give its tinker:// path."
        becoming.fault(f"{key}.path", f"'{lora.path}' is no path of the server.", cure)
    becoming.put("model.rank", lora.lora_rank)
    becoming.put("model.train_unembed", False)  # PEFT's all-linear leaves out the output layer


def _template(file: TrinityFile, becoming: Becoming) -> None:
    section, rollout = file.model, file.explorer.rollout_model
    formats = _formats(file)
    thinking = {"explorer.rollout_model.enable_thinking": rollout.enable_thinking}
    if not any(value is not None for value in thinking.values()):
        thinking = {"model.enable_thinking": section.enable_thinking}
    thinking |= {f"{key}.enable_thinking": one.enable_thinking for key, one in formats}
    if (value := _one_of(thinking, becoming)) is not None:
        becoming.put("model.chat_template_values.enable_thinking", value)
    if section.chat_template_path:
        path = Path(section.chat_template_path).expanduser()
        if path.is_file():
            becoming.put("model.chat_template", path.read_text(encoding="utf-8"))
        else:
            becoming.fault("model.chat_template_path", f"there is no file {path}.", "Check the path.")
        return
    templates = {"model.custom_chat_template": rollout.chat_template or section.custom_chat_template}
    templates |= {f"{key}.chat_template": one.chat_template for key, one in formats}
    if template := _one_of(templates, becoming):
        becoming.put("model.chat_template", template)


def _formats(file: TrinityFile) -> list[tuple[str, Format]]:
    """Of everything that is asked or learned from, with their keys."""
    given, taught = file.buffer.explorer_input, file.buffer.trainer_input
    found: list[tuple[str, Format]] = []
    place = "buffer.explorer_input"
    for name, tasksets in (("tasksets", given.tasksets), ("eval_tasksets", given.eval_tasksets)):
        found += [(f"{place}.{name}[{at}].format", one.format) for at, one in enumerate(tasksets)]
    if given.taskset is not None:
        found.append((f"{place}.taskset.format", given.taskset.format))
    buffers = {f"auxiliary_buffers.{name}": one for name, one in taught.auxiliary_buffers.items()}
    if taught.experience_buffer is not None:
        buffers["experience_buffer"] = taught.experience_buffer
    return found + [(f"buffer.trainer_input.{name}.format", one.format) for name, one in buffers.items()]


def _one_of(values: Mapping[str, Any], becoming: Becoming) -> Any:
    """The value of those keys that have one; a run has one for all."""
    given = {key: value for key, value in values.items() if value not in (None, "")}
    first = next(iter(given.values()), None)
    for key, value in given.items():
        if value != first:
            becoming.fault(key, "it is another elsewhere, and a run has one.", "Make them alike, or give it once.")
    return first


def _lengths(file: TrinityFile, becoming: Becoming) -> None:
    model, rollout = file.model, file.explorer.rollout_model
    prompt = rollout.max_prompt_tokens or model.max_prompt_tokens
    reply = rollout.max_response_tokens or model.max_response_tokens
    whole = rollout.max_model_len or model.max_model_len
    for key, value in (("max_prompt_tokens", prompt), ("max_response_tokens", reply), ("max_model_len", whole)):
        if value is not None and value < 1:
            becoming.fault(f"model.{key}", f"{value} is no length.", "Set 1 or more.")
            return
    if prompt and reply and whole and prompt + reply > whole:
        what = f"max_prompt_tokens + max_response_tokens ({prompt} + {reply}) is more than max_model_len ({whole})."
        becoming.fault("model.max_model_len", what, f"Raise it to {prompt + reply}, or lower one of the others.")
    if whole is None and not (prompt and reply):
        cure = "Set model.max_response_tokens and model.max_prompt_tokens, or model.max_model_len."
        becoming.fault("model.max_model_len", "nothing says how long a reply may be.", cure)
        return
    if reply is None and whole is not None:
        reply = whole - (prompt or 0)
        if reply < 1:
            cure = "Lower max_prompt_tokens, or raise max_model_len."
            becoming.fault("model.max_prompt_tokens", f"{prompt} leaves nothing of max_model_len {whole}.", cure)
            return
    becoming.put("sampling.max_tokens", reply)
    if prompt is not None:
        becoming.put("sampling.max_prompt_tokens", prompt)
    if rollout.ignore_eos:
        becoming.put("sampling.stop", [])
