"""What the tests of fused kernels run in the process of the stand-in device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tests.engine.device import programs, stand_in
from tests.engine.plain_kernels import PlainKernels
from tinsmith.engine.base import LoraSpec
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.lora import fused_layers, layers, linear
from tinsmith.engine.lora.adapter import AdapterWeights
from tinsmith.engine.lora.elementwise import choice
from tinsmith.engine.model import loading

PRODUCTS = {"aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm"}
TOKENS = 64


class DeviceKernels:
    """Plain kernels, each of which is one launch."""

    def __getattr__(self, name: str) -> Any:
        kernel = getattr(PlainKernels(), name)
        return lambda *args, **kwargs: stand_in.launch(f"fused::{name}", kernel, *args, **kwargs)


@contextmanager
def kernels() -> Iterator[None]:
    """Engines on the device have kernels."""
    with patch.object(
        choice, "kernels_on", lambda device, _: DeviceKernels() if device.type == stand_in.NAME else None
    ):
        yield


def differences(source: Path, **settings: Any) -> tuple[dict[str, float], set[str]]:
    """Largest differences between an engine with fused kernels and one on the CPU, and the kernels that ran."""
    with kernels(), stand_in.counting() as counts:
        numbers = programs.differences(source, programs.train_and_sample, **settings)
    return numbers, {name for name in counts.launches if name.startswith("fused::")}


def layer_costs(source: Path, *, fused: bool) -> tuple[int, int]:
    """Launches of a bfloat16 layer, forward and backward, with one adapter, and bytes of those that are no products."""
    base = loading.load(EngineConfig(source=str(source), dtype="bfloat16", device="cpu"))
    active = linear.adapt(base)
    base = layers.replace_layers(base)
    move(base.model)
    with kernels() if fused else nullcontext():
        fused_layers.use_kernels(base)
    layout = linear.layout_for(base, LoraSpec(rank=2, seed=0, train_unembed=False))
    flat = layout.initial().to(base.device)
    weights = AdapterWeights(layout.scale, layout.pairs(flat.bfloat16()), layout.pairs(torch.zeros_like(flat)))
    residual = torch.randn(1, TOKENS, base.head.shape[1], device=base.device).requires_grad_()
    tables = base.body.get_submodule("rotary_emb")(residual, torch.arange(TOKENS, device=base.device)[None])
    layer = base.body.get_submodule("layers.0")
    with active.using([(weights, 0, TOKENS)]), stand_in.counting() as counts:
        output = layer(residual, position_embeddings=tables, context=Context())
        output.backward(output.detach())
    elementwise = sum(number for name, number in counts.bytes.items() if name not in PRODUCTS)
    return counts.launches.total(), elementwise


def move(model: torch.nn.Module) -> None:
    """Move a model to the device, where the check at load computes float32 models only."""
    device = stand_in.install()
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, torch.nn.Parameter(parameter.detach().to(device), requires_grad=False))
        for name, value in list(vars(module).items()) + list(module.named_buffers(recurse=False)):
            if isinstance(value, Tensor):
                setattr(module, name, value.to(device))
        if isinstance(module, linear.LoraLinear):
            frozen: Any = module.frozen
            frozen._weight, frozen.device = frozen._weight.to(device), device


class Context:
    """Attention is one launch, and one in the backward."""

    def attend(self, _layer: int, *heads: Any) -> Tensor:
        return Attention.apply(*heads[:3])


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(query, key, value)
        return stand_in.launch("attention", lambda query, *_: query.transpose(1, 2).contiguous(), query, key, value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return stand_in.launch(
            "attention", lambda *heads: tuple(map(torch.zeros_like, heads[1:])), grads[0], *ctx.saved_tensors
        )
