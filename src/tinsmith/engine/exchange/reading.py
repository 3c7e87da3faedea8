"""Reads an adapter folder in any of the forms: the engine's own, Tinker's, PEFT's, vLLM's.

In PEFT's forms an adapter has other names and shapes than here: one pair for a projection whose slices of rows have
pairs of their own here, one pair for gate and up of all experts, or a pair for each expert (`expert_forms`). Modules
that an adapter leaves out have rank 0. One that its settings select and its files lack is an error.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tinsmith.engine.base import LoraSpec
from tinsmith.engine.exchange.expert_forms import Matrices, block_columns, read_fused, shared_or_none
from tinsmith.engine.exchange.files import modules_of, read_tensors
from tinsmith.engine.exchange.forms import TINKER_HEAD, ModelFacts, facts_of_config, tinker_name
from tinsmith.engine.lora import linear
from tinsmith.engine.lora.adapter import AdapterLayout, AdapterSite
from tinsmith.engine.lora.peft_settings import PeftSettings, read_settings
from tinsmith.engine.lora.saved_spec import read_config, spec_of
from tinsmith.engine.lora.targets import LinearTarget, Target
from tinsmith.engine.model.base_model import BaseModel
from tinsmith.engine.model_parts import HEAD, is_row_slice
from tinsmith.errors import Unsupported

_OTHER_BASE = "Give the base model that it was trained on."


@dataclass(frozen=True, slots=True)
class StoredPair:
    """A and B of a site, of experts [E, ...] or [1, ...], and the alpha of their rank."""

    a: Tensor
    b: Tensor
    alpha: float

    @property
    def rank(self) -> int:
        return self.a.shape[-2]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


Pairs = dict[str, StoredPair]


def read_saved(folder: Path, base: BaseModel) -> tuple[AdapterLayout, Tensor]:
    """An adapter of `base` in any form: its layout there, and its values, float32 [size] on the CPU.

    Raises NotFound if the folder holds no config, ConfigError for files that are damaged or incomplete, Unsupported for
    an adapter of another model, that is not plain LoRA, or that changes weights which no adapter here reaches.
    """
    sites = linear.layout_for(base, LoraSpec(rank=1, seed=0)).sites
    settings = read_settings(read_config(folder), folder)
    tensors = read_tensors(folder)
    if modules_of(tensors) <= {site.name for site in sites}:
        spec, pairs = _finished(_direct(tensors, sites, settings, folder), sites, settings, folder)
    else:
        facts = facts_of_config(base.model.config, base.card.source)
        spec, pairs = _pairs_of_model(tensors, settings, facts, folder)
    return _fitted(linear.layout_for(base, spec), pairs)


def read_with_facts(folder: Path, facts: ModelFacts) -> tuple[AdapterLayout, Tensor]:
    """The same without the model's weights."""
    spec, pairs = read_pairs(folder, facts)
    return _fitted(facts.layout(spec), pairs)


def read_pairs(folder: Path, facts: ModelFacts) -> tuple[LoraSpec, Pairs]:
    """The spec of an adapter in any form, and its pairs by site. Errors as of `read_saved`."""
    settings = read_settings(read_config(folder), folder)
    return _pairs_of_model(read_tensors(folder), settings, facts, folder)


def _pairs_of_model(
    tensors: dict[str, Tensor], settings: PeftSettings, facts: ModelFacts, folder: Path
) -> tuple[LoraSpec, Pairs]:
    tensors = {_renamed(name, facts): tensor for name, tensor in tensors.items()}
    sites = facts.layout(LoraSpec(rank=1, seed=0)).sites
    has_services_head = f"{TINKER_HEAD}.lora_A.weight" in tensors
    pairs = {
        site: pair for target in facts.targets for site, pair in _read_target(target, tensors, settings, facts, folder)
    }
    if head := next((name for name in (HEAD, TINKER_HEAD) if f"{name}.lora_A.weight" in tensors), ""):
        pairs[HEAD] = _pair(*_pop(tensors, head), settings, HEAD, folder)
    if tensors:
        names = ", ".join(sorted(modules_of(tensors))[:3])
        raise Unsupported(
            f"{folder} does not hold an adapter of this base model, or one of weights that adapters here do not reach: "
            f"{names}.",
            "Train it on other modules, or merge it into the base model, and serve that.",
        )
    return _finished(pairs, sites, settings, folder, has_services_head=has_services_head)


def _direct(tensors: dict[str, Tensor], sites: Collection[AdapterSite], settings: PeftSettings, folder: Path) -> Pairs:
    """Pairs by site from a file that has the names of sites."""
    stored = modules_of(tensors)
    return {
        site.name: _pair(*_expanded(site.experts, *_pop(tensors, site.name)), settings, site.name, folder)
        for site in sites
        if site.name in stored
    }


def _finished(
    pairs: Pairs,
    sites: Collection[AdapterSite],
    settings: PeftSettings,
    folder: Path,
    *,
    has_services_head: bool = False,
) -> tuple[LoraSpec, Pairs]:
    """The spec of an adapter and its pairs, checked against the sites of the model."""
    _check_shapes(pairs, sites, folder)
    _check_coverage(pairs, sites, settings, folder, has_services_head=has_services_head)
    sharing = {
        site: shared_or_none(site.rpartition(".")[2], pair.a, pair.b)
        for site, pair in pairs.items()
        if pair.a.ndim == 3
    }
    separate = any(pair is None for pair in sharing.values())
    if not separate:
        pairs |= {site: StoredPair(*pair, pairs[site].alpha) for site, pair in sharing.items() if pair is not None}
    spec = spec_of({site: (pair.alpha, pair.rank) for site, pair in pairs.items()}, separate=separate)
    assert spec is not None  # the sites are the model's
    return spec, pairs


def _check_shapes(pairs: Pairs, sites: Collection[AdapterSite], folder: Path) -> None:
    """Raises Unsupported for a matrix of another shape than its module takes."""
    by_name = {site.name: site for site in sites}
    for name, pair in pairs.items():
        site = by_name[name]
        for side, shape, expected in (
            ("A", pair.a.shape, (*[site.experts] * bool(site.experts), pair.rank, site.inputs)),
            ("B", pair.b.shape, (*[site.experts] * bool(site.experts), site.outputs, pair.rank)),
        ):
            if tuple(shape) != expected:
                raise Unsupported(
                    f"{name}.lora_{side}.weight in {folder} has the shape {list(shape)}; this base model takes "
                    f"{list(expected)}.",
                    _OTHER_BASE,
                )


def _check_coverage(
    pairs: Pairs,
    sites: Collection[AdapterSite],
    settings: PeftSettings,
    folder: Path,
    *,
    has_services_head: bool,
) -> None:
    """Raises Unsupported for a module that the settings select and the files lack, or the reverse.

    The names of slices of rows and of experts are this engine's: a pattern of PEFT's does not mean them. Where the
    settings name no modules, all layers must have the same.
    """
    kinds = {_kind(name) for name in pairs}
    for site in sites:
        is_module = not (site.experts or is_row_slice(site.name))
        stored, selected = site.name in pairs, settings.selects(site.name)
        if settings.names_no_modules or not (is_module or settings.lists_modules):
            selected = _kind(site.name) in kinds and (selected or not is_module) and not settings.selects_layers
        elif not is_module:
            selected = selected and not is_row_slice(site.name)  # a short name may be that of a module
            selected |= _kind(site.name) in kinds and not settings.selects_layers
        if selected and not stored:
            raise Unsupported(
                f"{folder} lacks {site.name}.lora_A.weight and .lora_B.weight, which its settings select.",
                "Save the whole adapter again; after ZeRO-3 or FSDP, consolidate its parameters first.",
            )
        is_renamed = site.name == HEAD and has_services_head
        if stored and is_module and not is_renamed and not settings.selects(site.name):
            raise Unsupported(
                f"{folder} holds {site.name}.lora_A.weight, which its target_modules, exclude_modules or "
                "layers_to_transform leave out, so that PEFT would not load it.",
                "Let adapter_config.json select the modules that the adapter has.",
            )


def _fitted(layout: AdapterLayout, pairs: Pairs) -> tuple[AdapterLayout, Tensor]:
    """The layout with the ranks and factors of pairs, and their values in it."""
    factors = {
        name: pair.scale / layout.scale
        for name, pair in pairs.items()
        if not math.isclose(pair.scale, layout.scale, rel_tol=1e-12)
    }
    layout = layout.fit({name: pair.rank for name, pair in pairs.items()}, factors)
    flat = torch.zeros(layout.size, device="cpu")
    for name, pair in layout.own_pairs(flat).items():
        pair.a.copy_(pairs[name].a)
        pair.b.copy_(pairs[name].b)
    return layout, flat


def _pair(a: Tensor, b: Tensor, settings: PeftSettings, module: str, folder: Path) -> StoredPair:
    """A pair of a module by its name in the file. Raises Unsupported for another rank than the settings give it."""
    check_rank(module, a.shape[-2], settings, folder)
    return StoredPair(a, b, settings.alpha_of(module))


def check_rank(module: str, rank: int, settings: PeftSettings, folder: Path) -> None:
    """Raises Unsupported unless the settings give a module, or a parameter of experts, this rank."""
    if rank != settings.rank_of(module):
        raise Unsupported(
            f"{module}.lora_A.weight in {folder} has rank {rank}; r and rank_pattern give it "
            f"{settings.rank_of(module)}.",
            "Save the adapter and its adapter_config.json together again.",
        )


def _kind(site: str) -> str:
    """The names of a site's module and of its parent."""
    return ".".join(site.split(".")[-2:])


def _renamed(name: str, facts: ModelFacts) -> str:
    """A tensor's name in the module tree of today's transformers."""
    paths = [target.name for target in facts.targets]
    if ".block_sparse_moe." in name and not any(".block_sparse_moe." in path for path in paths):
        return name.replace(".block_sparse_moe.", ".mlp.")
    return name


def _read_target(
    target: Target, tensors: dict[str, Tensor], settings: PeftSettings, facts: ModelFacts, folder: Path
) -> Iterator[tuple[str, StoredPair]]:
    """(site, pair) of a target, in whichever form the file has it; the tensors are taken out of the dict."""
    for site in target.sites:
        names = (site.name, tinker_name(site.name, facts))
        if name := next((name for name in names if f"{name}.lora_A.weight" in tensors), ""):
            a, b = _expanded(site.experts, *_pop(tensors, name))
            yield site.name, _pair(a, b, settings, site.name, folder)
    modules = [name for name in (f"{target.name}.base_layer", target.name) if f"{name}.lora_A.weight" in tensors]
    if isinstance(target, LinearTarget):
        if target.slices and modules:
            whole = _pair(*_pop(tensors, target.name), settings, target.name, folder)
            yield from _split_rows(target, whole, settings.rank)
        return
    if modules:
        matrices = [_pop(tensors, name) for name in modules]
        try:
            fused = list(read_fused(target, matrices, settings.rank, interleaved=facts.interleaved))
        except (ValueError, RuntimeError) as error:
            raise Unsupported(f"{modules[0]}.lora_A.weight in {folder}: {error}.", _OTHER_BASE) from error
        for site, parameter, rank, (a, b) in fused:
            check_rank(parameter, rank, settings, folder)
            yield site, StoredPair(a, b, settings.alpha_of(parameter) * a.shape[-2] / rank)
    for leaf, name in facts.expert_names.items():
        yield from _read_experts(target.name, leaf, name, target.experts, tensors, settings, folder)


def _read_experts(
    stack: str,
    leaf: str,
    name: str,
    count: int,
    tensors: dict[str, Tensor],
    settings: PeftSettings,
    folder: Path,
) -> Iterator[tuple[str, StoredPair]]:
    """A site's pair from one for each expert."""
    paths = [f"{stack}.{expert}.{name}" for expert in range(count)]
    stored = [path for path in paths if f"{path}.lora_A.weight" in tensors]
    if not stored:
        return
    if missing := set(paths) - set(stored):
        raise Unsupported(
            f"{folder} lacks {min(missing)}.lora_A.weight, which other experts have.", "Train all experts of a layer."
        )
    pairs = [_pair(*_pop(tensors, path), settings, path, folder) for path in paths]
    if len({(pair.a.shape, pair.b.shape, pair.alpha) for pair in pairs}) > 1:
        raise Unsupported(
            f"{folder} gives the experts of {stack} several shapes, ranks or scales.",
            "Train them with one value of rank_pattern and alpha_pattern for all experts of a layer.",
        )
    a, b = torch.stack([pair.a for pair in pairs]), torch.stack([pair.b for pair in pairs])
    yield f"{stack}.{leaf}", StoredPair(a, b, pairs[0].alpha)


def _expanded(experts: int, a: Tensor, b: Tensor) -> Matrices:
    """A and B, of experts for each of them."""
    if not experts or a.ndim != 3 or {len(a), len(b)} - {1, experts}:
        return a, b
    return a.expand(experts, -1, -1), b.expand(experts, -1, -1)


def _split_rows(target: LinearTarget, pair: StoredPair, rank: int) -> Iterator[tuple[str, StoredPair]]:
    """Pairs of a projection's slices of rows, from one pair of its own rank or from a block-diagonal one."""
    a, b = pair.a, pair.b
    if b.shape[0] != target.outputs:
        raise Unsupported(
            f"{target.name}.lora_B.weight has {b.shape[0]} rows; this base model takes {target.outputs}.", _OTHER_BASE
        )
    own = block_columns([rows.view(b.T).flatten(1).T for rows in target.slices], rank)
    left = b.clone()
    for rows, columns in zip(target.slices, own, strict=True):
        yield rows.name, StoredPair(a[columns], rows.view(b[:, columns].T).flatten(1).T, pair.scale * len(a[columns]))
        rows.view(left[:, columns].T).zero_()
    if left.any():
        raise Unsupported(
            f"The adapter changes rows of {target.name} that adapters here do not reach, or ties slices of it.",
            "Merge it into the base model, and serve that.",
        )


def _pop(tensors: dict[str, Tensor], name: str) -> Matrices:
    return tensors.pop(f"{name}.lora_A.weight"), tensors.pop(f"{name}.lora_B.weight")
