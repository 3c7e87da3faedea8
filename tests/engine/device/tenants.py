"""Passes of many tenants through one projection on the stand-in device, and what they cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from unittest.mock import patch

import torch
from torch import nn

from tests.engine.device import stand_in
from tinsmith.engine.base import LoraSpec
from tinsmith.engine.lora import grouped_adapters
from tinsmith.engine.lora.adapter import AdapterLayout, AdapterWeights, PlacedAdapter
from tinsmith.engine.lora.linear import ActiveAdapters, LoraLinear
from tinsmith.engine.lora.targets import LinearTarget

WIDTH = 32


def counts_of_passes(
    lengths: Sequence[int], dtype: torch.dtype, *, grouped: bool = False
) -> list[tuple[int, int, int]]:
    """Launches, host reads and uploads of two passes, forward and backward, with one tenant for each length."""
    with patch.object(grouped_adapters, "has_grouped_products", lambda _: grouped):
        return list(_counts(lengths, dtype))


def _counts(lengths: Sequence[int], dtype: torch.dtype) -> Iterator[tuple[int, int, int]]:
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
    for _ in range(2):
        with stand_in.counting() as counts, active.using(placed):
            module(inputs).backward(grads)
        yield counts.launches.total(), counts.reads.total(), counts.uploads.total()
