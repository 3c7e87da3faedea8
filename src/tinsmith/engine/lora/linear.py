"""The projections of a base model with LoRA adapters added, forward and backward written by hand.

`adapt` replaces every projection that adapters reach (`targets`) by a LoraLinear. The shared ActiveAdapters hold which
adapter serves which packed positions of the current pass; each projection computes

    y = W x + s B A x        W frozen, s = alpha / rank, A and B of the adapter at that position

The backward adds the adapters' gradients to their gradient buffers and returns the gradient of the input. It forms no
gradient of W. A fused projection can have a pair A, B for each of several slices of its rows. Projections that read the
same input (q, k, v; gate, up) are computed together: their A matrices are concatenated, so that A x is one product.

Adapters are computed in groups (`adapter_groups`), on GPUs with a kernel for it as grouped products
(`grouped_adapters`), and on some CPUs by compiled functions (`compiled_adapters`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D
from typing_extensions import override

from tinsmith.engine.base import LoraSpec
from tinsmith.engine.lora import compiled_adapters, grouped_adapters, targets
from tinsmith.engine.lora.adapter import AdapterLayout, AdapterSite, PlacedAdapter
from tinsmith.engine.lora.adapter_groups import AdapterBatch, AdapterGroups, AdapterSlice, Padding
from tinsmith.engine.lora.compiled_projections import Panels
from tinsmith.engine.lora.experts.install import install as install_experts
from tinsmith.engine.lora.experts.stack import stack_of
from tinsmith.engine.lora.grouped_adapters import Stacks
from tinsmith.engine.lora.matmul import FrozenLinear
from tinsmith.engine.lora.quantized_linear import DecodedLinear, QuantizedLinear, frozen_linear
from tinsmith.engine.model.base_model import BaseModel
from tinsmith.engine.model.support import is_expert_stack
from tinsmith.engine.model_parts import HEAD
from tinsmith.engine.threads.state import ThreadState

MIN_BATCH_ADAPTERS = 4
"""Fewer adapters of one shape are computed one by one."""

MAX_BATCH_POSITIONS = 192
"""An adapter with more positions is computed by itself."""

_LENGTH_CLASSES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, MAX_BATCH_POSITIONS)
"""Adapters are batched with others of the same class of length, so that little is padded."""


@dataclass(slots=True)
class _Served:
    """The adapters of the pass that a thread computes."""

    groups: AdapterGroups = ()
    placed: tuple[PlacedAdapter, ...] = ()
    stacks: list[Stacks] = field(default_factory=list)
    """Of the groups of the last pass."""
    compiled: list[compiled_adapters.CompiledAdapters] = field(default_factory=list)
    """The groups of the last pass, if it was one of several like it."""


class ActiveAdapters:
    """Which adapter serves which packed positions of the pass that the current thread computes; shared by all
    projections."""

    def __init__(self, *, compiled: bool = False) -> None:
        """`compiled`: whether compiled functions compute adapters."""
        self._compiled, self._served = compiled, ThreadState(_Served)

    @property
    def groups(self) -> AdapterGroups:
        """The adapters, those that are computed together in a group."""
        return self._served.now.groups

    @property
    def placed(self) -> tuple[PlacedAdapter, ...]:
        """The adapters with their positions."""
        return self._served.now.placed

    @contextmanager
    def using(self, placed: Sequence[PlacedAdapter], *, repeats: bool = False) -> Iterator[None]:
        """Serve these adapters within the context, for forward and backward. `repeats`: the next pass likely has the
        same, none of which is trained, and gets what is computed for them."""
        self.resume(placed, repeats=repeats)
        try:
            yield
        finally:
            self.resume(())

    @contextmanager
    def serving(self, groups: AdapterGroups) -> Iterator[None]:
        """Serve the adapters of these groups within the context."""
        self._served.own.groups = groups
        try:
            yield
        finally:
            self.resume(())

    def resume(self, placed: Sequence[PlacedAdapter], *, repeats: bool = False) -> None:
        """Serve these adapters from now on."""
        served = self._served.own
        grouped, others = grouped_adapters.group_adapters(
            [entry for entry in placed if entry[1] < entry[2]], served.stacks
        )
        compiled = list[compiled_adapters.CompiledAdapters]()
        if self._compiled:
            compiled, others = compiled_adapters.compiled_groups(others, served.compiled)
        served.placed, served.groups = tuple(placed), [*grouped, *compiled, *group_adapters(others)]
        if placed:
            served.stacks, served.compiled = [each.stacks for each in grouped], compiled if repeats else []

    def release_memory(self) -> None:
        """Drop what later passes would use again."""
        self._served.own.stacks, self._served.own.compiled = [], []


class LoraLinear(nn.Module):
    """A frozen projection plus the contribution of the active adapters."""

    def __init__(self, base: nn.Linear | Conv1D, target: targets.LinearTarget, active: ActiveAdapters) -> None:
        super().__init__()
        self.frozen = frozen_linear(base)
        self.name, self.target, self.active = target.name, target, active

    @override
    def forward(self, inputs: Tensor) -> Tensor:
        (output,) = project(inputs.flatten(0, -2), [self.projection], self.active.groups)
        return output.view(*inputs.shape[:-1], -1)

    @property
    def projection(self) -> Projection:
        """Argument of `project`."""
        return Projection(self.name, self.frozen, self.target.slices)


def adapt(base: BaseModel) -> ActiveAdapters:
    """Replace every projection that adapters reach by a LoraLinear, and compute experts here too (`experts`).

    Returns the ActiveAdapters that they share. Raises Unsupported for a model with linear modules of unknown meaning.
    """
    linear = [target for target in targets.targets(base.model) if isinstance(target, targets.LinearTarget)]
    widths = {width for target in linear for site in target.sites for width in (site.inputs, site.outputs)}
    active = ActiveAdapters(compiled=compiled_adapters.work_on(base.device, base.dtype, widths, base.checks))
    for target in linear:
        parent, _, leaf = target.name.rpartition(".")
        module: Any = base.model.get_submodule(target.name)
        setattr(base.model.get_submodule(parent), leaf, LoraLinear(module, target, active))
    install_experts(base.model, active)
    return active


def layout_for(base: BaseModel, spec: LoraSpec) -> AdapterLayout:
    """Layout of an adapter on an adapted base, over the modules that the spec trains."""
    sites = targets.sites_for(adapted_targets(base.model), spec)
    if spec.train_unembed:
        sites.append(AdapterSite(HEAD, base.head.shape[1], base.head.shape[0]))
    return AdapterLayout(spec, tuple(sites))


def adapted_targets(model: nn.Module) -> Iterator[targets.Target]:
    """Everything that adapters reach of a model on which `adapt` has run, in the order of its modules.

    The output projection of a mixer comes last: transformers' Gated DeltaNet has it first, that of this engine last.
    """
    for _, same_parent in groupby(_targets(model), lambda target: target.name.rpartition(".")[0]):
        yield from sorted(same_parent, key=lambda target: target.name.endswith(".linear_attn.out_proj"))


def _targets(model: nn.Module) -> Iterator[targets.Target]:
    for module in model.modules():
        if isinstance(module, LoraLinear):
            yield module.target
        elif is_expert_stack(module):
            yield targets.expert_target(stack_of(module).name, module)


@dataclass(frozen=True, slots=True)
class Projection:
    """A frozen projection, its module name, and the slices of its rows that have pairs of their own."""

    name: str
    frozen: FrozenLinear | QuantizedLinear | DecodedLinear
    slices: tuple[targets.RowSlice, ...] = ()


def project(inputs: Tensor, projections: Sequence[Projection], groups: AdapterGroups) -> tuple[Tensor, ...]:
    """inputs [T, in] -> outputs [T, out] of each projection, including the adapters that have these projections."""
    first = projections[0]
    name = first.slices[0].name if first.slices else first.name
    groups = [group for group in groups if group.has(name)]
    if torch.is_grad_enabled() and inputs.requires_grad:
        return _Project.apply(inputs, projections, groups)  # type: ignore[no-any-return]
    return tuple(_forward(inputs, projections, groups)[0])


def _for_backward(projections: Sequence[Projection]) -> Sequence[Projection]:
    """The projections with 4-bit matrices that stay decoded for the backward, where there is memory."""
    if not any(isinstance(projection.frozen, QuantizedLinear) for projection in projections):
        return projections
    return [
        replace(projection, frozen=projection.frozen.for_backward())
        if isinstance(projection.frozen, QuantizedLinear)
        else projection
        for projection in projections
    ]


def _sites(
    projections: Sequence[Projection], wide: Sequence[Tensor], *, write: bool
) -> tuple[list[str], Sequence[Tensor], list[tuple[Tensor, Tensor]]]:
    """Names of the sites of projections, and their columns of the projections' outputs or gradients [T, out].

    The columns are views. Those of slices in blocks are copies; `write` returns each with the view it was copied from.
    """
    if not any(projection.slices for projection in projections):
        return [projection.name for projection in projections], wide, []
    names, columns, copies = list[str](), list[Tensor](), list[tuple[Tensor, Tensor]]()
    for projection, tensor in zip(projections, wide, strict=True):
        for rows in projection.slices:
            view = rows.view(tensor)
            names.append(rows.name)
            columns.append(view.flatten(1) if rows.blocks > 1 else view)
            if write and rows.blocks > 1:
                copies.append((view, columns[-1]))
        if not projection.slices:
            names.append(projection.name)
            columns.append(tensor)
    return names, columns, copies


def _panels(projections: Sequence[Projection]) -> list[Panels] | None:
    """The matrices of projections that compiled functions compute in one call, with their adapters; None of others."""
    matrices = [each.frozen for each in projections if isinstance(each.frozen, FrozenLinear) and not each.slices]
    panels = [matrix.panels for matrix in matrices if matrix.panels is not None]
    if len(panels) < len(projections):
        return None
    for matrix in matrices:
        matrix.products += 1
    return panels


def _forward(
    inputs: Tensor, projections: Sequence[Projection], groups: AdapterGroups
) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs of each projection, and A x of each group."""
    if (panels := _panels(projections)) is not None:
        names = [projection.name for projection in projections]
        return compiled_adapters.project(inputs, panels, groups, names)
    outputs = [projection.frozen(inputs) for projection in projections]
    if not groups:
        return outputs, []
    names, columns, copies = _sites(projections, outputs, write=True)
    narrow = [group.forward(inputs, columns, names) for group in groups]
    for view, copy in copies:
        view.copy_(copy.view_as(view))
    return outputs, narrow


class _Project(torch.autograd.Function):
    @staticmethod
    @override
    def forward(
        ctx: Any, inputs: Tensor, projections: Sequence[Projection], groups: AdapterGroups
    ) -> tuple[Tensor, ...]:
        ctx.frozen, projections = projections, _for_backward(projections)
        outputs, narrow = _forward(inputs, projections, groups)
        trained = any(group.has_gradients for group in groups)
        ctx.save_for_backward(*((inputs, *narrow) if trained else ()))
        ctx.projections, ctx.groups = projections, groups
        return tuple(outputs)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        inputs, *narrow = ctx.saved_tensors or (None, *(None for _ in ctx.groups))
        if (panels := _panels(ctx.projections)) is not None:
            names = [projection.name for projection in ctx.projections]
            return compiled_adapters.project_back(grads, panels, ctx.groups, names, inputs, narrow), None, None
        input_grad = ctx.projections[0].frozen.backward(grads[0])
        for grad, projection in zip(grads[1:], ctx.projections[1:], strict=True):
            input_grad = projection.frozen.backward(grad, onto=input_grad)
        names, columns, _ = _sites(ctx.projections, grads, write=False)
        for group, of_group in zip(ctx.groups, narrow, strict=True):
            group.backward(input_grad, columns, names, inputs, of_group)
        ctx.projections = ctx.frozen  # frees decoded matrices before the layers below need theirs
        return input_grad, None, None


def group_adapters(placed: Sequence[PlacedAdapter]) -> list[AdapterSlice | AdapterBatch]:
    """Batch neighbouring adapters of one shape and similar length; the others are computed one by one.

    On GPUs, where launches cost more than rows that are not neighbours, all adapters of one shape and similar length.
    """
    if any(pair.a.device.type != "cpu" for weights, _, _ in placed[:1] for pair in weights.pairs.values()):
        keys = {key: number for number, key in enumerate(dict.fromkeys(map(_batch_key, placed)))}
        placed = sorted(placed, key=lambda entry: keys[_batch_key(entry)])
    batches: list[AdapterBatch] = []
    slices: list[AdapterSlice] = []
    for key, neighbours in groupby(placed, key=_batch_key):
        members = list(neighbours)
        if key is None or len(members) < MIN_BATCH_ADAPTERS:
            slices += [AdapterSlice(weights, start, stop) for weights, start, stop in members]
        else:
            batches.append(_adapter_batch(members))
    return [*batches, *slices]


def _batch_key(placed: PlacedAdapter) -> tuple[object, ...] | None:
    """Shapes, modules, scale and class of length, which agree within a batch; None for an adapter of its own."""
    weights, start, stop = placed
    name = next(iter(weights.pairs), None)
    if stop - start > MAX_BATCH_POSITIONS or name is None:
        return None
    length_class = next(length for length in _LENGTH_CLASSES if length >= stop - start)
    return weights.pairs[name].a.shape, tuple(weights.pairs), weights.scale, length_class


def _adapter_batch(members: Sequence[PlacedAdapter]) -> AdapterBatch:
    weights = tuple(weights for weights, _, _ in members)
    starts = np.array([start for _, start, _ in members])
    lengths = np.array([stop - start for _, start, stop in members])
    steps = np.arange(lengths.max())
    index = starts[:, None] + np.minimum(steps, lengths[:, None] - 1)
    padding = None
    if not np.array_equal(index.ravel(), np.arange(starts[0], starts[0] + index.size)):
        device = next(iter(weights[0].pairs.values())).a.device
        padding = _padding(index, np.flatnonzero(steps < lengths[:, None]), device)
    return AdapterBatch(weights, len(steps), int(starts[0]), padding)


def _padding(index: np.ndarray, places: np.ndarray, device: torch.device) -> Padding:
    """In one copy to the device."""
    uploaded = torch.from_numpy(np.concatenate([index.ravel(), places])).to(device)
    flat, at = uploaded[: index.size], uploaded[index.size :]
    mask = torch.zeros(index.size, dtype=torch.bool, device=device).index_fill_(0, at, True)
    return Padding(flat.view(index.shape), mask.view(*index.shape, 1), at, flat.index_select(0, at))
