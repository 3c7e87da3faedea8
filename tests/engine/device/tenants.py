"""Passes of many tenants through one projection, or a layer's experts, on the stand-in device, and what they cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from unittest.mock import patch

import torch
from torch import nn

from tests.engine.device import stand_in
from tests.engine.lora.experts.stacks import adapter_of, routing_of, stack_of, using
from tinsmith.engine.base import LoraSpec
from tinsmith.engine.lora import grouped_adapters
from tinsmith.engine.lora.adapter import AdapterLayout, AdapterWeights, LoraPair, PlacedAdapter
from tinsmith.engine.lora.experts.install import expert_outputs
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


def counts_of_experts(experts: int, tenants: int, *, separate: bool = False, before: int = 0) -> stand_in.Counts:
    """What the experts of a layer cost, forward and backward, with so many tokens before those of the first tenant."""
    device, tokens = stand_in.install(), before + 6 * tenants
    stack = stack_of("qwen3_moe", experts, torch.bfloat16, WIDTH, WIDTH)
    for name, parameter in stack.module.named_parameters():
        stack.module._parameters[name] = nn.Parameter(parameter.to(device), requires_grad=False)
    placed = []
    for number in range(tenants):
        weights = adapter_of(stack, 8, number, torch.bfloat16, separate=separate)
        pairs, gradients = (
            {name: LoraPair(pair.a.to(device), pair.b.to(device)) for name, pair in each.items()}
            for each in (weights.pairs, weights.gradients)
        )
        start = before + 6 * number
        placed.append((AdapterWeights(0.5, pairs, gradients), start, start + 6))
    index, factors = routing_of(tokens, experts, 3)
    hidden, weights = torch.ones(tokens, WIDTH).bfloat16().to(device), factors.bfloat16().to(device)
    index = index.to(device)
    with (
        patch.object(grouped_adapters, "has_grouped_products", lambda _: True),
        using(stack, placed),
        stand_in.counting() as counts,
    ):
        output = expert_outputs(stack.module, hidden.requires_grad_(), index, weights.requires_grad_())
        output.backward(torch.ones_like(output))
    return counts
