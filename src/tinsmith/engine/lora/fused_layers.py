"""Fused kernels for the norms, rotations and gates of layers, where they compute the same.

A layer's residual addition and the norm after it are one kernel, so decoder layers are replaced too. What does not
equal PyTorch's operators on this device leaves the model as `layers` made it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from tinsmith.engine.lora import layers
from tinsmith.engine.lora.elementwise import choice, fused
from tinsmith.engine.model.base_model import BaseModel
from tinsmith.engine.model.hybrid.gated_delta_net import MIXER, GatedDeltaNet
from tinsmith.engine.model.hybrid.rule.choice import rule_on
from tinsmith.engine.model.self_check import probe

log = logging.getLogger(__name__)

LAYER_TOLERANCE = 1e-3
"""Mean error of what a decoder layer adds to the residual stream in units of its standard deviation. Compared without
kernels, which round in other places."""

_PARTS = {"input_layernorm", "post_attention_layernorm", "mlp"}
_MIXERS = {"self_attn", MIXER}


class DecoderLayer(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x)), where the addition before the second norm is part of its kernel."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        for name, child in base.named_children():  # in their order, which is that of adapters
            self.add_module(name, child)
        self._mixer = next(name for name, _ in base.named_children() if name in _MIXERS)

    @override
    def forward(self, hidden_states: Tensor, **settings: Any) -> Tensor:
        parts: Any = self
        residual, normed = parts.input_layernorm.after(hidden_states, None)
        mixed = parts.get_submodule(self._mixer)(hidden_states=normed, **settings)
        mixed = mixed[0] if isinstance(mixed, tuple) else mixed
        residual, normed = parts.post_attention_layernorm.after(residual, mixed)
        return residual + parts.mlp(normed)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class _Call:
    """A decoder layer and what it was called with."""

    stack: nn.ModuleList
    number: int
    inputs: Tensor
    settings: Mapping[str, Any]

    @property
    def layer(self) -> nn.Module:
        return self.stack[self.number]


@torch.no_grad()
def use_kernels(base: BaseModel, probe_base: BaseModel | None = None) -> None:
    """Let fused kernels compute the layers that `layers.replace_layers` has replaced, if this device has kernels and
    their results agree.

    A base whose projections may have no values yet comes with `probe_base`, the first layers of the same model: where
    these can have the form of DecoderLayer, all can, and only the kernels are computed here.
    """
    _use_rules(base)
    kernels = choice.kernels_on(base.device, base.dtype) if base.float32_residual else None
    if kernels is None:
        return
    originals = [(stack, number, layer) for stack in _stacks(base) for number, layer in enumerate(stack)]
    try:
        if probe_base is None:
            _replace(kernels, base)
        else:
            calls = _recorded_probe(probe_base)[1]
            _check(kernels, base, calls)
            for stack, number, layer in originals if all(map(_replacement, calls)) else ():
                stack[number] = DecoderLayer(layer)
            _set(base, kernels)
    except Exception:
        log.warning("Fused kernels do not work for %s: it is slower without them.", base.card.source, exc_info=True)
        _set(base, None)
        for stack, number, layer in originals:
            stack[number] = layer


def _use_rules(base: BaseModel) -> None:
    """Let recurrent layers compute passes by the fastest rule."""
    mixers = [module for module in base.body.modules() if isinstance(module, GatedDeltaNet)]
    rules = {shape: rule_on(base.device, base.dtype, shape) for shape in {mixer.shape for mixer in mixers}}
    for mixer in mixers:
        mixer.rule = rules[mixer.shape]


def _replace(kernels: fused.Kernels, base: BaseModel) -> None:
    """Let the kernels compute the base. Raises ValueError if its results are others."""
    check = partial(_replaceable, kernels, base)
    # A GPU is not part of what kept results depend on.
    numbers = base.checks.result("fused layers", check) if base.device.type == "cpu" else check()
    _install(kernels, base, numbers)


def _replaceable(kernels: fused.Kernels, base: BaseModel) -> list[list[int]]:
    """The numbers of each stack's layers that can have the form of DecoderLayer; leaves them so, with the kernels.
    Raises ValueError if the base's results are others then."""
    probed = replace(base, flex_attention=False)  # not compiled yet
    expected, calls = _recorded_probe(probed)
    _check(kernels, base, calls)
    replaced = [call for call in calls if _replacement(call)]
    numbers = [[call.number for call in replaced if call.stack is stack] for stack in _stacks(base)]
    _install(kernels, base, numbers)
    if not layers.same_hidden_states(probed, expected):
        raise ValueError("the model has other hidden states with fused kernels")
    return numbers


def _install(kernels: fused.Kernels, base: BaseModel, numbers: Sequence[Sequence[int]]) -> None:
    """Let the kernels compute the base's modules, and give these layers of each stack the form of DecoderLayer."""
    for stack, replaced in zip(_stacks(base), numbers, strict=True):
        for number in replaced:
            if not isinstance(stack[number], DecoderLayer):
                stack[number] = DecoderLayer(stack[number])
    _set(base, kernels)


def _stacks(base: BaseModel) -> list[nn.ModuleList]:
    return [module for module in base.body.children() if isinstance(module, nn.ModuleList)]


def _modules(base: BaseModel) -> list[Any]:
    """The modules that kernels can compute; norms of heads are part of their attention."""
    kinds = (layers.RMSNorm, layers.Attention, layers.MLP, GatedDeltaNet)
    named = ((name.rpartition(".")[2], module) for name, module in base.body.named_modules())
    return [module for name, module in named if isinstance(module, kinds) and name not in layers.HEAD_NORMS]


def _set(base: BaseModel, kernels: fused.Kernels | None) -> None:
    """Let these kernels compute the base's modules; None: PyTorch's operators."""
    for module in _modules(base):
        if isinstance(module, GatedDeltaNet):
            norm = None if kernels is None else partial(fused.gated_norm, kernels, module.norm_weight, module.eps)
            module.gated_norm = norm
        else:
            module.kernels = kernels


def _recorded_probe(base: BaseModel) -> tuple[Tensor, list[_Call]]:
    """The hidden states of the probe, and the calls of decoder layers with nothing but hidden states and settings."""
    calls = list[_Call]()

    def hook(stack: nn.ModuleList, number: int) -> Callable[..., None]:
        def record(_: nn.Module, inputs: tuple[Tensor, ...], settings: dict[str, Any]) -> None:
            if len(inputs) == 1:
                calls.append(_Call(stack, number, inputs[0], settings))

        return record

    hooks = [
        layer.register_forward_pre_hook(hook(stack, number), with_kwargs=True)
        for stack in _stacks(base)
        for number, layer in enumerate(stack)
    ]
    try:
        return probe(base), calls
    finally:
        for each in hooks:
            each.remove()


def _replacement(call: _Call) -> DecoderLayer | None:
    """The replacement of a layer that gives the same results without kernels; None for layers of other kinds."""
    parts = dict(call.layer.named_children())
    mixers = [name for name in parts if name not in _PARTS]
    if not (parts.keys() >= _PARTS and len(mixers) == 1 and mixers[0] in _MIXERS and _are_norms(parts)):
        return None
    replacement = DecoderLayer(call.layer)
    try:
        expected, actual = (layer(call.inputs, **call.settings) - call.inputs for layer in (call.layer, replacement))
    except Exception:  # noqa: BLE001 - a layer that cannot be called like this is of another kind
        return None
    return replacement if (actual - expected).abs().mean() <= LAYER_TOLERANCE * expected.std() else None


def _are_norms(parts: Mapping[str, nn.Module]) -> bool:
    return all(isinstance(parts[name], layers.RMSNorm) for name in ("input_layernorm", "post_attention_layernorm"))


def _check(kernels: fused.Kernels, base: BaseModel, calls: list[_Call]) -> None:
    """Raises ValueError unless the kernels give the results of each kind of module."""
    table: Tensor = next(call.settings["position_embeddings"][0].to(base.device) for call in calls)
    checks = {key: check for module in _modules(base) for key, check in _checks(kernels, module, table)}
    for check in checks.values():
        check()


def _checks(kernels: fused.Kernels, module: Any, table: Tensor) -> Iterator[tuple[object, Callable[[], None]]]:
    """The checks of a module, each with what it depends on. `table` is one of the model's rotation."""
    if isinstance(module, layers.RMSNorm):
        norm = module.constants
        yield ("norm", norm.weight.shape, norm.invertible), partial(choice.check_norm, kernels, norm)
    elif isinstance(module, layers.MLP):
        width = module.gate_proj.target.outputs
        yield ("gate", width), partial(choice.check_gate, kernels, width, table)
    elif isinstance(module, GatedDeltaNet):
        weight = module.norm_weight
        yield "gated norm", partial(choice.check_gated_norm, kernels, weight, module.eps, table.dtype)
    else:
        numbers = module.o_proj.target.inputs, module.k_proj.target.outputs
        for number, norm in zip(numbers, (module.q_norm, module.k_norm), strict=True):
            heads, constants = (number // module.width, module.width), norm and norm.constants
            check = partial(choice.check_rotation, kernels, heads, constants, table.shape[-1], table)
            yield ("rotation", heads, norm is None), check
