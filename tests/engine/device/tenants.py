"""Passes of many tenants through one projection on the stand-in device, and what they cost."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from tests.engine.device import stand_in
from tinsmith.engine.base import LoraSpec
from tinsmith.engine.lora.adapter import AdapterLayout, AdapterWeights, PlacedAdapter
from tinsmith.engine.lora.linear import ActiveAdapters, LoraLinear
from tinsmith.engine.lora.targets import LinearTarget

WIDTH = 32


def counts_of_pass(lengths: Sequence[int], dtype: torch.dtype) -> tuple[int, int]:
    """Launches and host reads of a forward and a backward with one tenant for each length."""
    device = stand_in.install()
    target, active = LinearTarget("layer", "mlp", WIDTH, WIDTH), ActiveAdapters()
    module = LoraLinear(nn.Linear(WIDTH, WIDTH, device=device, dtype=dtype), target, active)
    placed, start = list[PlacedAdapter](), 0
    for number, length in enumerate(lengths):
        layout = AdapterLayout(LoraSpec(rank=8, seed=number), target.sites)
        flat = layout.initial().to(device)
        gradients = layout.pairs(torch.zeros_like(flat))
        weights = AdapterWeights(layout.scale, layout.pairs(flat.to(dtype)), gradients)
        placed.append((weights, start, start + length))
        start += length
    inputs = torch.ones(1, start, WIDTH, device=device, dtype=dtype).requires_grad_()
    grads = torch.ones(1, start, WIDTH, device=device, dtype=dtype)
    with active.using(placed), stand_in.counting() as counts:
        module(inputs).backward(grads)
    return counts.launches.total(), counts.reads.total()
