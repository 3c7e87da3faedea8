"""Writes adapters of any model in the forms that other programs read: Tinker's, PEFT's, vLLM's.

`expert_forms` says how the forms differ for experts. A projection whose slices of rows have pairs of their own is one
pair in PEFT's form, of the sum of their ranks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import (
    _MODEL_TO_CONVERSION_PATTERN as _FAMILIES,  # pyright: ignore[reportPrivateUsage]
)
from transformers.pytorch_utils import Conv1D

from tinsmith.atomic import atomic_folder, folder_size
from tinsmith.engine.base import LoraSpec
from tinsmith.engine.exchange.expert_forms import Matrices, expert_parameter, fused, per_expert
from tinsmith.engine.images.tower import without_weights
from tinsmith.engine.lora.adapter import AdapterLayout, AdapterSite, LoraPair
from tinsmith.engine.lora.peft import site_settings
from tinsmith.engine.lora.peft_settings import patterns
from tinsmith.engine.lora.saved_spec import PREFIX
from tinsmith.engine.lora.targets import ExpertTarget, LinearTarget, Target, sites_for, targets
from tinsmith.engine.model_parts import HEAD
from tinsmith.errors import Unsupported

Form = Literal["fused", "per_expert"]
"""Forms of experts in PEFT's format."""
TINKER_HEAD = "model.unembed_tokens"
VLLM_FUSED = {"gpt_oss", "qwen3_5_moe", "qwen3_5_moe_text", "nemotron_h", "gemma4", "gemma4_text"}
"""Model types whose experts vLLM loads in the fused form; for others it takes a pair for each expert."""
EXPERT_NAMES = {
    "mixtral": {"w1": "w1", "w3": "w3", "w2": "w2"},
    "qwen2_moe": {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"},
}
"""Names of one expert's projections in checkpoints, by transformers' name for the family."""
_PEFT_WITHOUT_OUT_PROJ = {"falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h"}
_UNGATED_NAMES = {"w1": "up_proj", "w2": "down_proj"}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the forms need to know of a base model, beside the layout of an adapter."""

    source: str
    model_type: str
    targets: tuple[Target, ...]
    vocabulary: int
    hidden: int
    linears: frozenset[str]
    """Paths of all linear modules, adapted or not."""
    interleaved: bool
    """Whether gate and up take turns in the rows of the experts' fused projection."""

    def layout(self, spec: LoraSpec) -> AdapterLayout:
        """The layout of an adapter of the model."""
        sites = sites_for(self.targets, spec)
        if spec.train_unembed:
            sites.append(AdapterSite(HEAD, self.hidden, self.vocabulary))
        return AdapterLayout(spec, tuple(sites))

    @property
    def family(self) -> str:
        """Transformers' name for the way in which checkpoints of this type store experts; "" for a way of its own."""
        return _FAMILIES.get(self.model_type, self.model_type if self.model_type in EXPERT_NAMES else "")

    @property
    def expert_names(self) -> Mapping[str, str]:
        gated = all(target.has_gate for target in self.targets if isinstance(target, ExpertTarget))
        return EXPERT_NAMES.get(self.family, EXPERT_NAMES["qwen2_moe"]) if gated else _UNGATED_NAMES


def facts_of_config(config: PreTrainedConfig, source: str) -> ModelFacts:
    """Facts of the model that transformers builds from a config, without weights."""
    return model_facts(without_weights(config), source)


def model_facts(model: PreTrainedModel, source: str) -> ModelFacts:
    """Facts of a model as transformers builds it, before `adapt`; the meta device is enough."""
    modules: list[tuple[str, Any]] = list(model.named_modules())
    adapted = tuple(targets(model))
    stacks = [model.get_submodule(target.name) for target in adapted if isinstance(target, ExpertTarget)]
    vocabulary, hidden = model.get_output_embeddings().weight.shape  # type: ignore[union-attr,misc]
    return ModelFacts(
        source=source,
        vocabulary=vocabulary,
        hidden=hidden,
        model_type=model.config.get_text_config().model_type,
        targets=adapted,
        linears=frozenset(name for name, module in modules if isinstance(module, nn.Linear | Conv1D)),
        interleaved=any(stack.has_gate and not stack.is_concatenated for stack in stacks),  # pyright: ignore[reportAttributeAccessIssue]
    )


def write_tinker(folder: Path, layout: AdapterLayout, flat: Tensor, facts: ModelFacts) -> int:
    """Write an adapter as an archive of the hosted service holds it; returns its size in bytes."""
    pairs = layout.own_pairs(flat.cpu())
    matrices = {tinker_name(name, facts): (pair.a, pair.b) for name, pair in pairs.items()}
    for target in facts.targets:
        if isinstance(target, ExpertTarget) and not target.has_gate and f"{target.name}.w1" in pairs:
            matrices[f"{target.name}.w3"] = torch.empty(0), torch.empty(0)
    return _write(folder, matrices, _config(layout, facts, **site_settings(layout)))


def write_peft(folder: Path, layout: AdapterLayout, flat: Tensor, facts: ModelFacts, form: Form | None = None) -> int:
    """Write an adapter in PEFT's format; returns its size in bytes.

    By default experts are in the fused form, which PEFT loads for every model type. Raises Unsupported for an adapter
    that PEFT would load in part only.
    """
    form = form or "fused"
    _check_peft_loads(layout, facts, form)
    return _write_form(folder, layout, flat, facts, form)


def _write_form(
    folder: Path, layout: AdapterLayout, flat: Tensor, facts: ModelFacts, form: Form, *, for_vllm: bool = False
) -> int:
    if for_vllm:  # which applies lora_alpha / r to all modules
        layout, flat = layout.with_one_scale(flat)
    pairs = layout.own_pairs(flat.cpu())
    scales = {site.name: site.factor * layout.scale for site in layout.sites}
    covered = [target for target in facts.targets if any(site.name in pairs for site in target.sites)]
    modules: dict[str, _Module] = {}
    for target in covered:
        own = {site.name: pairs[site.name] for site in target.sites if site.name in pairs}
        if isinstance(target, ExpertTarget):
            modules |= _expert_modules(target, own, scales, facts, form)
        elif for_vllm and len(own) > 1 and splits_for_vllm(target.name):
            modules |= {name: _Module.plain(name, pair, scales[name]) for name, pair in own.items()}
        else:
            same, scale = _with_scale_of_first(own, scales)
            modules[target.name] = _Module.plain(target.name, _fuse_rows(target, same), scale)
    if HEAD in pairs:
        modules[HEAD] = _Module.plain(HEAD, pairs[HEAD], scales[HEAD])
    values = {module.path: (module.rank, _alpha(module, layout)) for module in modules.values()}
    settings: dict[str, object] = {
        **_targets(covered, facts, form, pairs, for_vllm=for_vllm),
        **patterns(values, layout.spec.rank, layout.spec.alpha),
    }
    matrices = {name: module.matrices for name, module in modules.items()}
    return _write(folder, matrices, _config(layout, facts, **{key: value for key, value in settings.items() if value}))


@dataclass(frozen=True, slots=True)
class _Module:
    """A module's matrices in a file, and its path for patterns of ranks and alphas."""

    path: str
    matrices: Matrices
    rank: int
    scale: float

    @classmethod
    def plain(cls, path: str, pair: LoraPair, scale: float) -> _Module:
        """A module that is not a stack of experts."""
        return cls(path, (pair.a, pair.b), pair.a.shape[-2], scale)


def _alpha(module: _Module, layout: AdapterLayout) -> float:
    """The alpha of a module's rank: exactly the adapter's where rank and scale are."""
    if (module.rank, module.scale) == (layout.spec.rank, layout.scale):
        return layout.spec.alpha
    return module.scale * module.rank


def _expert_modules(
    target: ExpertTarget, own: Mapping[str, LoraPair], scales: Mapping[str, float], facts: ModelFacts, form: Form
) -> dict[str, _Module]:
    """The modules of a layer's experts in a form of PEFT."""
    if form == "per_expert":
        return {
            name: _Module.plain(name, LoraPair(*matrices), scales[f"{target.name}.{leaf}"])
            for leaf, projection in facts.expert_names.items()
            for name, matrices in per_expert(target, own, {leaf: projection}).items()
        }
    up, up_scale = _with_scale_of_first({name: pair for name, pair in own.items() if not name.endswith(".w2")}, scales)
    parameters = fused(target, {**own, **up}, interleaved=facts.interleaved)
    modules = {}
    for parameter, (a, b) in parameters.items():
        is_down = parameter.endswith(".down_proj")
        is_inner = not is_down and len(parameters) > 1
        modules[f"{target.name}.base_layer" if is_inner else target.name] = _Module(
            parameter, (a, b), len(a) // target.experts, scales[f"{target.name}.w2"] if is_down else up_scale
        )
    return modules


def _with_scale_of_first(
    pairs: Mapping[str, LoraPair], scales: Mapping[str, float]
) -> tuple[dict[str, LoraPair], float]:
    """Pairs that become one pair, with the scale of the first; the B of the others hold the difference."""
    scale = scales[next(iter(pairs))] if pairs else 1.0
    return {
        name: pair if scales[name] == scale else LoraPair(pair.a, pair.b * (scales[name] / scale))
        for name, pair in pairs.items()
    }, scale


def write_vllm(folder: Path, layout: AdapterLayout, flat: Tensor, facts: ModelFacts) -> int:
    """Write an adapter as vLLM loads it; returns its size in bytes.

    vLLM's `--max-lora-rank` must be at least the largest rank in the config's `rank_pattern`.
    """
    form: Form = "fused" if facts.model_type in VLLM_FUSED else "per_expert"
    return _write_form(folder, layout, flat, facts, form, for_vllm=True)


def splits_for_vllm(name: str) -> bool:
    """Whether vLLM fuses a projection's slices of rows itself, as it does for Gated DeltaNet."""
    return ".linear_attn." in name


def _fuse_rows(target: LinearTarget, pairs: Mapping[str, LoraPair]) -> LoraPair:
    """One pair for a projection whose slices of rows have pairs: A stacked, B block-diagonal."""
    if not target.slices:
        return pairs[target.name]
    slices = [(rows, pair) for rows in target.slices if (pair := pairs.get(rows.name)) is not None]
    columns, start = torch.zeros(sum(len(pair.a) for _, pair in slices), target.outputs), 0  # B transposed
    for rows, pair in slices:
        view = rows.view(columns[start : start + len(pair.a)])
        view.copy_(pair.b.T.reshape(view.shape))
        start += len(pair.a)
    return LoraPair(torch.cat([pair.a for _, pair in slices]), columns.T.contiguous())


def _check_peft_loads(layout: AdapterLayout, facts: ModelFacts, form: Form) -> None:
    """Raises Unsupported for modules that PEFT refuses, or takes for the experts'."""
    names = {site.name for site in layout.sites if layout.rank_of(site)}
    linears = (target for target in facts.targets if isinstance(target, LinearTarget))
    covered = {target.name.rpartition(".")[2] for target in linears if any(site.name in names for site in target.sites)}
    if "out_proj" in covered and facts.model_type in _PEFT_WITHOUT_OUT_PROJ:
        raise Unsupported(
            f"PEFT refuses adapters on out_proj of {facts.model_type}, which this adapter has.",
            "Export it in Tinker's form or as a merged model, or train without attention.",
        )
    if taken := sorted(covered & set(EXPERT_NAMES.get(facts.family, {}).values())):
        raise Unsupported(
            f"PEFT takes {', '.join(taken)} of {facts.model_type} for its routed experts, and would not load the "
            "adapter's pairs of its dense or shared MLPs.",
            "Export it in Tinker's form or as a merged model, or train without the MLP.",
        )
    is_split = any(site.experts and site.name in names for site in layout.sites) and form == "per_expert"
    if is_split and facts.family not in EXPERT_NAMES:
        raise Unsupported(
            f"PEFT does not load a pair for each expert of {facts.model_type}.", "Use the fused form of experts."
        )


def _targets(
    covered: list[Target], facts: ModelFacts, form: Form, pairs: Mapping[str, LoraPair], *, for_vllm: bool
) -> dict[str, list[str]]:
    """PEFT's `target_modules` and `target_parameters`. Modules and parameters have short names where those mean no
    others."""
    linears = [target for target in covered if isinstance(target, LinearTarget)]
    names = {target.name for target in linears}
    stacks = [target for target in covered if isinstance(target, ExpertTarget)]
    others = {name.rpartition(".")[2] for name in facts.linears - names}
    modules = {leaf if (leaf := name.rpartition(".")[2]) not in others else name for name in names}
    for target in linears:
        if for_vllm and target.slices and splits_for_vllm(target.name):
            modules -= {target.name.rpartition(".")[2]}
            modules |= {site.name.rpartition(".")[2] for site in target.sites if site.name in pairs}
    if HEAD in pairs:
        modules.add(HEAD)
    if form == "per_expert":
        modules |= _expert_projections(stacks, facts, pairs)
        stacks = []
    parameters = {path for stack in stacks for path in _parameters(stack, pairs)}
    left = {path for target in facts.targets if isinstance(target, ExpertTarget) for path in _parameters(target)}
    others = {_short_parameter(path) for path in left - parameters}
    named = {short if (short := _short_parameter(path)) not in others else path for path in parameters}
    return {"target_modules": sorted(modules), "target_parameters": sorted(named, reverse=True)}


def _expert_projections(stacks: list[ExpertTarget], facts: ModelFacts, pairs: Mapping[str, LoraPair]) -> set[str]:
    """Names of the experts' projections: short ones where all layers have them."""
    names = set[str]()
    for leaf, projection in facts.expert_names.items():
        own = [stack for stack in stacks if f"{stack.name}.{leaf}" in pairs]
        is_everywhere = len(own) == sum(isinstance(target, ExpertTarget) for target in facts.targets)
        paths = {f"{stack.name}.{expert}.{projection}" for stack in own for expert in range(stack.experts)}
        names |= {projection} if is_everywhere else paths
    return names


def _parameters(target: ExpertTarget, pairs: Mapping[str, LoraPair] | None = None) -> set[str]:
    """Paths of the experts' fused parameters, or of those that the adapter has."""
    leaves = [site.name.rpartition(".")[2] for site in target.sites if pairs is None or site.name in pairs]
    return {expert_parameter(target, leaf) for leaf in leaves}


def _short_parameter(path: str) -> str:
    """The name of a parameter with those of its module and its parent."""
    return ".".join(path.split(".")[-3:])


def tinker_name(site: str, facts: ModelFacts) -> str:
    """A site's name in an archive of the hosted service."""
    if site == HEAD:
        return TINKER_HEAD
    return site.replace(".self_attn.", ".attn.") if facts.model_type == "gpt_oss" else site


def _config(layout: AdapterLayout, facts: ModelFacts, **settings: object) -> dict[str, object]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": facts.source,
        "r": layout.spec.rank,
        "lora_alpha": layout.spec.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        **settings,
    }


def _write(folder: Path, matrices: Mapping[str, Matrices], config: dict[str, object]) -> int:
    tensors = {}
    for name, pair in matrices.items():
        for side, matrix in zip("AB", pair, strict=True):
            whole = matrix.contiguous()
            is_part = whole.untyped_storage().nbytes() > whole.nbytes
            tensors[f"{PREFIX}{name}.lora_{side}.weight"] = whole.clone() if is_part else whole
    with atomic_folder(folder) as scratch:
        save_file(tensors, scratch / "adapter_model.safetensors", metadata={"format": "pt"})
        (scratch / "adapter_config.json").write_text(json.dumps(config, indent=2))
        return folder_size(scratch)
