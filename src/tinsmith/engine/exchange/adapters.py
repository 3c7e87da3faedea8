"""Adapter folders of others made readable for an engine, and those of an engine written in the forms of others.

Forms: PEFT's; Tinker's, whose head is named `model.unembed_tokens` and whose folder may hold the optimizer state;
vLLM's, which is PEFT's for dense models. `forms` writes those of mixtures and hybrids, and `reading` reads them.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from tinsmith.atomic import atomic_folder
from tinsmith.engine.exchange import forms
from tinsmith.engine.exchange.archive import CONFIG, MOMENTS, WEIGHTS
from tinsmith.engine.exchange.forms import TINKER_HEAD, splits_for_vllm
from tinsmith.engine.exchange.reading import flat_of, plain_config, read_pairs
from tinsmith.engine.lora.saved_spec import PREFIX, check_settings, completed_modules
from tinsmith.engine.model.sources import load_errors, locate
from tinsmith.engine.model_parts import HEAD, is_row_slice
from tinsmith.errors import ConfigError, Unsupported

_FROZEN = ("base_layer.weight", "embed_tokens.weight")
"""Ends of the names of copies of frozen weights, which PEFT saves beside an adapter of the head."""

Form = Literal["peft", "tinker", "vllm"]


def read_config(folder: Path) -> dict[str, Any]:
    """adapter_config.json of a folder. Raises ConfigError without one."""
    try:
        config = json.loads((folder / CONFIG).read_text())
        _ = int(config["r"]), float(config["lora_alpha"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{folder} holds no adapter: {CONFIG} cannot be read ({error!r}).",
            "Give a folder that PEFT's save_pretrained wrote, or a checkpoint archive (.tar).",
        ) from error
    return config


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Matrices of an adapter folder by name, such as model.layers.0.mlp.up_proj.lora_A.weight.

    The head is `lm_head` in every form. Raises ConfigError if the file is missing or not readable, Unsupported if it
    holds other things than LoRA matrices.
    """
    if not (folder / WEIGHTS).is_file():
        raise ConfigError(
            f"{folder} has no {WEIGHTS}.",
            "Pickled adapters (adapter_model.bin) are not read: save it again with safe_serialization=True.",
        )
    try:
        stored = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{folder / WEIGHTS} cannot be read: {error}.", "Copy or save it again.") from error
    tensors, others = {}, []
    for key, tensor in stored.items():
        module, _, matrix = key.removeprefix(PREFIX).rpartition(".lora_")
        if matrix in ("A.weight", "B.weight"):
            tensors[f"{HEAD if module == TINKER_HEAD else module}.lora_{matrix}"] = tensor
        elif not key.endswith(_FROZEN):
            others.append(key)
    if others:
        raise Unsupported(
            f"{folder} trains more than LoRA matrices: {', '.join(sorted(others)[:3])}.",
            "Only plain LoRA is supported: no modules_to_save, no DoRA, no biases, no trained tokens.",
        )
    if wrong := [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]:
        raise ConfigError(f"{wrong[0]} in {folder} holds values that are not finite.", "Use an earlier checkpoint.")
    return tensors


def make_readable(source: Path, to: Path) -> list[str]:
    """Write an adapter of PEFT or of an archive as a folder that an engine reads. Returns notes for the user.

    Raises Unsupported for what is not plain LoRA, by name, and ConfigError for a folder that cannot be read.
    """
    config, notes = read_config(source), []
    if config.get("modules_to_save"):
        raise Unsupported(
            f"{source} has trained whole modules: modules_to_save={config['modules_to_save']}.",
            "Train it again without modules_to_save; an adapter's matrices cannot hold them.",
        )
    tensors = {name: tensor.float() for name, tensor in read_tensors(source).items()}
    leaves = sorted({name.rpartition(".lora_")[0].rpartition(".")[2] for name in tensors})
    if config.get("use_rslora") and (config.get("rank_pattern") or config.get("alpha_pattern")):
        raise Unsupported(f"{source} has use_rslora and patterns of ranks.", "Save it with one rank.")
    if config.pop("use_rslora", False):
        config["lora_alpha"] = float(config["lora_alpha"]) * math.sqrt(int(config["r"]))
        notes.append(
            f"rsLoRA: alpha becomes {config['lora_alpha']:g}, the same adapter with alpha / rank as its scale."
        )
    config = plain_config(config, source)
    config |= {"target_modules": leaves, "modules_to_save": None}
    check_settings(config, source)
    with atomic_folder(to) as scratch:
        (scratch / CONFIG).write_text(json.dumps(config))
        save_file({PREFIX + name: tensor for name, tensor in tensors.items()}, scratch / WEIGHTS)
        if (source / MOMENTS).is_file():
            shutil.copyfile(source / MOMENTS, scratch / MOMENTS)
    if added := sorted(completed_modules(set(leaves)) - set(leaves)):
        if (to / MOMENTS).is_file():
            raise Unsupported(
                f"{source} has an optimizer state and lacks {', '.join(added)}.", f"Delete its {MOMENTS}."
            )
        notes.append(f"The adapter leaves out {', '.join(added)}: they start at zero and are trained from now on.")
    return notes


def write(source: Path, to: Path, form: Form, base: str | None = None) -> None:
    """Write an adapter folder in another form. `base` is the base model's name for whoever loads it."""
    config, tensors = read_config(source), read_tensors(source)
    if form != "tinker" and _needs_model(tensors, form):
        _write_with_model(source, to, form, base or str(config["base_model_name_or_path"]))
        return
    if base is not None:
        config["base_model_name_or_path"] = base
    with atomic_folder(to) as scratch:
        save_file(_named(tensors, form), scratch / WEIGHTS, metadata={"format": "pt"})
        (scratch / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        if form == "tinker" and (source / MOMENTS).is_file():
            shutil.copyfile(source / MOMENTS, scratch / MOMENTS)


def _needs_model(tensors: Mapping[str, Tensor], form: Form) -> bool:
    """Whether an adapter has matrices for experts, or for slices of a projection that the form fuses."""
    names = {name.rpartition(".lora_")[0] for name in tensors}
    slices = {name for name in names if is_row_slice(name) and not (form == "vllm" and splits_for_vllm(name))}
    return bool(slices) or any(tensor.ndim == 3 for tensor in tensors.values())


def _write_with_model(source: Path, to: Path, form: Form, base: str) -> None:
    """Write an adapter folder in a form of PEFT or vLLM that depends on the modules of the base model.

    Raises Unsupported, with the reason, for an adapter that PEFT would load in part only.
    """
    with load_errors(base):
        facts = forms.facts_of_config(AutoConfig.from_pretrained(locate(base).folder), base)
    spec, pairs = read_pairs(source, facts)
    layout = facts.layout(spec)
    write_form = forms.write_vllm if form == "vllm" else forms.write_peft
    write_form(to, layout, flat_of(source, layout, pairs), facts)


def _named(tensors: Mapping[str, Tensor], form: Form) -> dict[str, Tensor]:
    head = TINKER_HEAD if form == "tinker" else HEAD
    return {
        PREFIX + (name.replace(HEAD, head, 1) if name.startswith(f"{HEAD}.") else name): tensor.contiguous()
        for name, tensor in tensors.items()
    }
