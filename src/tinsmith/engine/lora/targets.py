"""What adapters reach of a model: its projections, slices of their rows, and the routed experts of its layers.

`model_parts` says by name which modules are adapted. A linear module that no rule names is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tinsmith.engine.base import LoraSpec
from tinsmith.engine.lora.adapter import AdapterSite
from tinsmith.engine.model.support import is_expert_stack, is_experts_module
from tinsmith.engine.model_parts import Part, is_in_encoder, part_of, place
from tinsmith.errors import Unsupported


@dataclass(frozen=True, slots=True)
class RowSlice:
    """Rows start..stop of each of `blocks` equal blocks of a projection's rows."""

    name: str
    start: int
    stop: int
    blocks: int = 1

    def view(self, output: torch.Tensor) -> torch.Tensor:
        """Its columns of a projection's outputs [T, out]: a view, with several blocks [T, blocks, stop - start]."""
        if self.blocks == 1:
            return output[:, self.start : self.stop]
        return output.unflatten(1, (self.blocks, -1))[:, :, self.start : self.stop]


@dataclass(frozen=True, slots=True)
class LinearTarget:
    """A projection that adapters reach, as a whole or in slices of its rows."""

    name: str
    part: Part
    inputs: int
    outputs: int
    slices: tuple[RowSlice, ...] = ()

    @property
    def sites(self) -> tuple[AdapterSite, ...]:
        if not self.slices:
            return (AdapterSite(self.name, self.inputs, self.outputs),)
        return tuple(
            AdapterSite(rows.name, self.inputs, rows.blocks * (rows.stop - rows.start)) for rows in self.slices
        )


@dataclass(frozen=True, slots=True)
class ExpertTarget:
    """The routed experts of a layer. Sites: w1 (gate; up where there is no gate), w2 (down), w3 (up)."""

    name: str
    experts: int
    hidden: int
    intermediate: int
    has_gate: bool
    part: Part = "mlp"

    @property
    def sites(self) -> tuple[AdapterSite, ...]:
        w1, w3 = (
            AdapterSite(f"{self.name}.{leaf}", self.hidden, self.intermediate, self.experts, "a")
            for leaf in ("w1", "w3")
        )
        w2 = AdapterSite(f"{self.name}.w2", self.intermediate, self.hidden, self.experts, "b")
        return (w1, w2, w3) if self.has_gate else (w1, w2)


Target = LinearTarget | ExpertTarget


def targets(model: PreTrainedModel) -> Iterator[Target]:
    """Everything of a model's layers that adapters reach, in the order of its modules.

    Raises Unsupported, with their names, for linear modules that no rule names.
    """
    unknown = set[str]()
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if module is head or is_in_encoder(name):
            continue
        if is_expert_stack(module):
            yield expert_target(name, module)
        elif isinstance(module, nn.Linear | Conv1D):
            part = part_of(name)
            if part is None:
                unknown.add(place(name))
            elif part:
                yield _linear_target(name, part, module, model.get_submodule(name.rpartition(".")[0]))
    if unknown:
        raise Unsupported(
            f"{type(model).__name__} has linear modules that are not known as projections or as frozen: "
            f"{', '.join(sorted(unknown))}.",
            "Models of this type cannot be served.",
        )


def sites_for(reached: Iterable[Target], spec: LoraSpec) -> list[AdapterSite]:
    """The sites of the body of an adapter, in the order of the targets."""
    trained = {"attn": spec.train_attn, "mlp": spec.train_mlp}
    sites = [site for target in reached if trained[target.part] for site in target.sites]
    return [replace(site, shared="") for site in sites] if spec.separate_experts else sites


def module_names(reached: Iterable[Target]) -> dict[Part, tuple[str, ...]]:
    """Short names of the sites of targets by part, in their order."""
    names: dict[Part, dict[str, None]] = {"attn": {}, "mlp": {}}
    for target in reached:
        for site in target.sites:
            leaf = site.name.rpartition(".")[2]
            names[target.part][f"experts.{leaf}" if isinstance(target, ExpertTarget) else leaf] = None
    return {part: tuple(leaves) for part, leaves in names.items()}


def unreached(model: PreTrainedModel) -> list[str]:
    """Experts that no adapter reaches, because they are not in transformers' common form."""
    modules = ((name, module) for name, module in model.named_modules() if is_experts_module(module))
    return sorted({place(name) for name, module in modules if not is_expert_stack(module)})


def expert_target(name: str, module: Any) -> ExpertTarget:
    """The target for the experts of a layer."""
    up = module.gate_up_proj if module.has_gate else module.up_proj
    count, outputs, inputs = up.shape if not module.is_transposed else (up.shape[0], up.shape[2], up.shape[1])
    return ExpertTarget(name, count, inputs, outputs // 2 if module.has_gate else outputs, bool(module.has_gate))


def _linear_target(name: str, part: Part, module: nn.Linear | Conv1D, parent: nn.Module) -> LinearTarget:
    # A 4-bit weight has the shape of its bytes, so that the module's numbers count.
    rows, columns = (
        (module.out_features, module.in_features) if isinstance(module, nn.Linear) else reversed(module.weight.shape)
    )
    prefix, _, leaf = name.rpartition(".")
    slices = tuple(_slices(leaf, parent, rows))
    named = tuple(RowSlice(f"{prefix}.{rows.name}", rows.start, rows.stop, rows.blocks) for rows in slices)
    return LinearTarget(name, part, columns, rows, named)


def _slices(leaf: str, parent: Any, rows: int) -> Iterator[RowSlice]:
    """The slices of a fused projection of `rows` rows that have pairs of their own."""
    if leaf == "in_proj_qkv":  # Gated DeltaNet: q, k, v
        key = parent.key_dim
        yield RowSlice("in_proj_q", 0, key)
        yield RowSlice("in_proj_k", key, 2 * key)
        yield RowSlice("in_proj_v", 2 * key, rows)
    elif leaf == "in_proj_qkvz":  # the same with z, interleaved by key head
        heads = parent.num_k_heads
        key, value = parent.key_dim // heads, parent.value_dim // heads
        yield RowSlice("in_proj_q", 0, key, heads)
        yield RowSlice("in_proj_k", key, 2 * key, heads)
        yield RowSlice("in_proj_v", 2 * key, 2 * key + value, heads)
        yield RowSlice("in_proj_z", 2 * key + value, 2 * (key + value), heads)
    elif leaf == "in_proj" and {"num_heads", "n_groups", "conv_dim"} <= vars(parent).keys():  # Mamba-2: z, x, B, C, dt
        width = parent.intermediate_size
        yield RowSlice("gate_proj", 0, width)
        yield RowSlice("x_proj", width, 2 * width)
