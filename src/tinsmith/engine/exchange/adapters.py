"""Adapter folders of others made readable for an engine, and those of an engine written in the forms of others.

Forms: PEFT's; Tinker's, whose head is named `model.unembed_tokens` and whose folder may hold the optimizer state;
vLLM's, which is PEFT's for dense models. `forms` writes those of mixtures and hybrids, and `reading` reads them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig

from tinsmith.atomic import atomic_folder
from tinsmith.engine.exchange import forms
from tinsmith.engine.exchange.archive import CONFIG, MOMENTS, WEIGHTS
from tinsmith.engine.exchange.files import modules_of, read_tensors
from tinsmith.engine.exchange.forms import TINKER_HEAD, splits_for_vllm
from tinsmith.engine.exchange.reading import check_rank, read_with_facts
from tinsmith.engine.lora.peft_settings import PeftSettings, patterns, read_settings
from tinsmith.engine.lora.saved_spec import PREFIX, read_config
from tinsmith.engine.model.sources import load_errors, locate
from tinsmith.engine.model_parts import HEAD, is_in_experts, is_row_slice
from tinsmith.errors import ConfigError

Form = Literal["peft", "tinker", "vllm"]


def make_readable(source: Path, to: Path) -> list[str]:
    """Write an adapter of PEFT or of an archive as a folder that an engine reads: one file in float32, plain names.
    Returns notes for the user.

    Raises Unsupported for what is not plain LoRA, by name, and NotFound or ConfigError for files that cannot be read.
    """
    config = read_config(source)
    read_settings(config, source)
    tensors = read_tensors(source)
    with atomic_folder(to) as scratch:
        (scratch / CONFIG).write_text(json.dumps(config))
        save_file({PREFIX + name: tensor for name, tensor in tensors.items()}, scratch / WEIGHTS)
        if (source / MOMENTS).is_file():
            shutil.copyfile(source / MOMENTS, scratch / MOMENTS)
    dropout = config.get("lora_dropout")
    return [f"lora_dropout={dropout} is not applied here: training goes on without dropout."] if dropout else []


def write(source: Path, to: Path, form: Form, base: str | None = None) -> None:
    """Write an adapter folder in another form. `base` is the base model's name for whoever loads it. Errors as of
    `make_readable`."""
    config = read_config(source)
    settings, tensors = read_settings(config, source), read_tensors(source)
    if _needs_model(tensors, form):
        named = base or config.get("base_model_name_or_path")
        if not named:
            raise ConfigError(f"{source} does not name its base model.", "Give its folder or hub id: --base.")
        _write_with_model(source, to, form, str(named))
        return
    _check_ranks(settings, tensors, source)
    if form == "vllm" and not settings.has_plain_scale:
        tensors, config = _with_one_scale(settings, tensors, config)
    if base is not None:
        config["base_model_name_or_path"] = base
    with atomic_folder(to) as scratch:
        save_file(_named(tensors, form), scratch / WEIGHTS, metadata={"format": "pt"})
        (scratch / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        if form == "tinker" and (source / MOMENTS).is_file():
            shutil.copyfile(source / MOMENTS, scratch / MOMENTS)


def _check_ranks(settings: PeftSettings, tensors: Mapping[str, Tensor], source: Path) -> None:
    """Raises Unsupported for a module with another rank than the settings give it, or that they leave out."""
    for module in sorted(modules_of(tensors)):
        if is_in_experts(module):  # one matrix of all experts; only shapes say of which parameter
            continue
        check_rank(module, tensors[f"{module}.lora_A.weight"].shape[-2], settings, source)


def _with_one_scale(
    settings: PeftSettings, tensors: Mapping[str, Tensor], config: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The adapter with lora_alpha / r as the scale of every module, as vLLM applies it: B holds the difference."""
    scaled, scale = dict(tensors), settings.alpha / settings.rank or 1.0
    for module in modules_of(tensors):
        name = f"{module}.lora_B.weight"
        scaled[name] = tensors[name] * (settings.alpha_of(module) / settings.rank_of(module) / scale)
    largest = max(tensors[f"{module}.lora_A.weight"].shape[-2] for module in modules_of(tensors))
    ranks = {module: tensors[f"{module}.lora_A.weight"].shape[-2] for module in modules_of(tensors)}
    plain = {"r": largest, "lora_alpha": scale * largest, "use_rslora": False}
    values = {module: (rank, scale * rank) for module, rank in ranks.items()}
    return scaled, {**config, **plain, **patterns(values, largest, scale * largest)}


def _needs_model(tensors: Mapping[str, Tensor], form: Form) -> bool:
    """Whether an adapter has matrices for experts, or for slices of a projection that the form fuses, and is not in
    the form already."""
    names = modules_of(tensors)
    has_peft_experts = any(is_in_experts(name) and tensors[f"{name}.lora_A.weight"].ndim == 2 for name in names)
    if form == "tinker":
        return has_peft_experts
    slices = {name for name in names if is_row_slice(name) and not (form == "vllm" and splits_for_vllm(name))}
    is_stack = any(tensor.ndim == 3 for tensor in tensors.values())
    return bool(slices) or is_stack or (form == "vllm" and has_peft_experts)


def _write_with_model(source: Path, to: Path, form: Form, base: str) -> None:
    """Write an adapter folder in a form that depends on the modules of the base model.

    Raises Unsupported, with the reason, for an adapter that PEFT would load in part only.
    """
    with load_errors(base):
        facts = forms.facts_of_config(AutoConfig.from_pretrained(locate(base).folder), base)
    write_form = {"tinker": forms.write_tinker, "vllm": forms.write_vllm, "peft": forms.write_peft}[form]
    write_form(to, *read_with_facts(source, facts), facts)


def _named(tensors: Mapping[str, Tensor], form: Form) -> dict[str, Tensor]:
    head = TINKER_HEAD if form == "tinker" else HEAD
    return {
        PREFIX + (name.replace(HEAD, head, 1) if name.startswith(f"{HEAD}.") else name): tensor.contiguous()
        for name, tensor in tensors.items()
    }
