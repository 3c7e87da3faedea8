"""Reads an adapter folder in any of the forms: the engine's own, Tinker's, PEFT's, vLLM's.

In PEFT's forms an adapter has other names and shapes than here: one pair for a projection whose slices of rows have
pairs of their own here, one pair for gate and up of all experts, or a pair for each expert (`expert_forms`). Matrices
that an adapter leaves out start as in a new adapter, where B is zero.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from tinsmith.engine.base import LoraSpec
from tinsmith.engine.exchange.expert_forms import Matrices, read_fused, shared_or_none
from tinsmith.engine.exchange.forms import TINKER_HEAD, ModelFacts, facts_of_config, tinker_name
from tinsmith.engine.lora import linear, peft
from tinsmith.engine.lora.adapter import AdapterLayout
from tinsmith.engine.lora.saved_spec import PREFIX, check_settings, read_spec, stored_shapes
from tinsmith.engine.lora.targets import LinearTarget, Target
from tinsmith.engine.model.base_model import BaseModel
from tinsmith.engine.model_parts import HEAD, PARTS, parts_of_sites
from tinsmith.errors import NotFound, Unsupported

_PATTERNS = ("rank_pattern", "alpha_pattern")
_SELECTIONS = ("target_parameters", "exclude_modules")


def read_saved(folder: Path, base: BaseModel) -> tuple[AdapterLayout, Tensor]:
    """An adapter of `base` in any form: its layout there, and its values, float32 [size] on the CPU.

    Raises NotFound if the folder does not hold an adapter of this model, Unsupported for one that is not plain LoRA, or
    that changes weights which no adapter here reaches.
    """
    everything = linear.layout_for(base, LoraSpec(rank=1, seed=0))
    sites = {site.name for site in everything.sites}
    stored = {name.rpartition(".lora_")[0] for name in stored_shapes(folder)}
    if stored <= sites:
        layout = linear.layout_for(base, read_spec(folder))
        if stored == {site.name for site in layout.sites}:
            return layout, peft.read(folder, layout)
    spec, pairs = read_pairs(folder, facts_of_config(base.model.config, base.card.source))
    layout = linear.layout_for(base, spec)
    return layout, flat_of(folder, layout, pairs)


def read_any(folder: Path, layout: AdapterLayout, facts: ModelFacts) -> Tensor:
    """An adapter in any form as a flat float32 [size] tensor in `layout`. Errors as of `read_saved`."""
    return flat_of(folder, layout, read_pairs(folder, facts)[1])


def read_pairs(folder: Path, facts: ModelFacts) -> tuple[LoraSpec, dict[str, Matrices]]:
    """The spec of an adapter in any form, and A and B by site, of which some may be missing. Errors as of
    `read_saved`."""
    try:
        config = json.loads((folder / "adapter_config.json").read_text())
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
        stored = load_file(folder / "adapter_model.safetensors")
        check_settings(plain_config(config, folder), folder)
        tensors = {_renamed(key.removeprefix(PREFIX), facts): value.float() for key, value in stored.items()}
        tensors = {key: value for key, value in tensors.items() if value.numel()}
        pairs = {site: pair for target in facts.targets for site, pair in _read_target(target, tensors, rank, facts)}
        if head := next((name for name in (HEAD, TINKER_HEAD) if f"{name}.lora_A.weight" in tensors), ""):
            pairs[HEAD] = _pop(tensors, head)
    except (OSError, KeyError, ValueError, RuntimeError, TypeError, SafetensorError) as error:
        raise NotFound(f"{folder} does not hold an adapter of this base model: {error!r}", "Save it again.") from error
    if tensors:
        names = ", ".join(sorted({name.rpartition(".lora_")[0] for name in tensors})[:3])
        raise Unsupported(
            f"{folder} does not hold an adapter of this base model, or one of weights that adapters here do not reach: "
            f"{names}.",
            "Train it on other modules, or merge it into the base model, and serve that.",
        )
    sharing = {site: shared_or_none(site.rpartition(".")[2], *pair) for site, pair in pairs.items() if _is_stack(pair)}
    separate = any(pair is None for pair in sharing.values())
    if not separate:
        pairs |= {site: pair for site, pair in sharing.items() if pair is not None}
    largest = max((a.shape[-2] for a, _ in pairs.values()), default=rank)
    parts = parts_of_sites(pairs)
    trained = {f"train_{part}": part in parts for part in PARTS}
    spec = LoraSpec(rank=largest, seed=0, alpha=alpha / rank * largest, **trained, separate_experts=separate)
    return spec, pairs


def plain_config(config: Mapping[str, Any], source: Path) -> dict[str, Any]:
    """An adapter_config.json without the settings that the names and shapes of the matrices show.

    Raises Unsupported if alpha / rank is not the same for all of them.
    """
    ranks, alphas = (config.get(name) or {} for name in _PATTERNS)
    scale = float(config["lora_alpha"]) / int(config["r"])
    patterns = {name: (ranks.get(name, config["r"]), alphas.get(name, config["lora_alpha"])) for name in ranks | alphas}
    if others := [name for name, (rank, alpha) in patterns.items() if abs(alpha / rank - scale) > 1e-6 * scale]:
        raise Unsupported(
            f"{source} scales {', '.join(others)} in another way than its other modules, by rank_pattern or "
            "alpha_pattern.",
            "Train it with one value of lora_alpha / r for all modules.",
        )
    return {key: value for key, value in config.items() if key not in (*_PATTERNS, *_SELECTIONS)}


def flat_of(folder: Path, layout: AdapterLayout, pairs: Mapping[str, Matrices]) -> Tensor:
    """The values of an adapter in a layout whose rank may be larger than that of some pairs."""
    flat = layout.initial()
    stored = {_kind(site) for site in pairs}
    try:
        for name, pair in layout.pairs(flat).items():
            if name in pairs:
                a, b = pairs[name]
                pair.a[..., : a.shape[-2], :].copy_(peft.shaped(a, pair.a[..., : a.shape[-2], :]))
                pair.b[..., : b.shape[-1]].copy_(peft.shaped(b, pair.b[..., : b.shape[-1]]))
            elif _kind(name) in stored:
                raise KeyError(name)
    except (KeyError, ValueError) as error:
        raise NotFound(f"{folder} does not hold an adapter of this base model: {error!r}", "Save it again.") from error
    if unknown := set(pairs) - {site.name for site in layout.sites}:
        raise NotFound(f"{folder} does not hold an adapter of this base model: {min(unknown)}.", "Save it again.")
    if not bool(torch.isfinite(flat).all()):
        raise NotFound(f"The adapter in {folder} holds values that are not finite.", "Save it again.")
    return flat


def _kind(site: str) -> str:
    """The names of a site's module and of its parent."""
    return ".".join(site.split(".")[-2:])


def _is_stack(pair: Matrices) -> bool:
    return pair[0].ndim == 3


def _renamed(name: str, facts: ModelFacts) -> str:
    """A tensor's name in the module tree of today's transformers."""
    paths = [target.name for target in facts.targets]
    if ".block_sparse_moe." in name and not any(".block_sparse_moe." in path for path in paths):
        return name.replace(".block_sparse_moe.", ".mlp.")
    return name


def _read_target(
    target: Target, tensors: dict[str, Tensor], rank: int, facts: ModelFacts
) -> Iterator[tuple[str, Matrices]]:
    """(site, A and B) of a target, in whichever form the file has it; the tensors are taken out of the dict."""
    for site in (site.name for site in target.sites):
        if name := next((name for name in (site, tinker_name(site, facts)) if f"{name}.lora_A.weight" in tensors), ""):
            yield site, _expanded(target, *_pop(tensors, name))
    modules = [name for name in (f"{target.name}.base_layer", target.name) if f"{name}.lora_A.weight" in tensors]
    if isinstance(target, LinearTarget):
        if target.slices and modules:
            yield from _split_rows(target, *_pop(tensors, target.name), rank)
        return
    if modules:
        matrices = [_pop(tensors, name) for name in modules]
        yield from read_fused(target, matrices, rank, interleaved=facts.interleaved)
    for leaf, name in facts.expert_names.items():
        if f"{target.name}.0.{name}.lora_A.weight" in tensors:
            each = [_pop(tensors, f"{target.name}.{expert}.{name}") for expert in range(target.experts)]
            yield f"{target.name}.{leaf}", (torch.stack([a for a, _ in each]), torch.stack([b for _, b in each]))


def _expanded(target: Target, a: Tensor, b: Tensor) -> Matrices:
    """A and B, of experts for each of them."""
    if isinstance(target, LinearTarget):
        return a, b
    return a.expand(target.experts, -1, -1), b.expand(target.experts, -1, -1)


def _split_rows(target: LinearTarget, a: Tensor, b: Tensor, rank: int) -> Iterator[tuple[str, Matrices]]:
    """Pairs of a projection's slices of rows, from one pair of its own rank or from a block-diagonal one."""
    is_stacked = len(a) == len(target.slices) * rank
    left = b.clone()
    for number, rows in enumerate(target.slices):
        own = slice(number * rank, (number + 1) * rank) if is_stacked else slice(None)
        yield rows.name, (a[own], rows.view(b[:, own].T).flatten(1).T)
        rows.view(left[:, own].T).zero_()
    if left.any():
        raise Unsupported(
            f"The adapter changes rows of {target.name} that adapters here do not reach, or ties slices of it.",
            "Merge it into the base model, and serve that.",
        )


def _pop(tensors: dict[str, Tensor], name: str) -> Matrices:
    return tensors.pop(f"{name}.lora_A.weight"), tensors.pop(f"{name}.lora_B.weight")
