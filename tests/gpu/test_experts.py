"""Experts as grouped products in bfloat16 against the loop over experts in float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.engine.lora.experts.stacks import adapter_of, routing_of, stack_of
from tinsmith.engine.lora.adapter import AdapterWeights, LoraPair
from tinsmith.engine.lora.experts import grouped, loops
from tinsmith.engine.lora.grouped_adapters import has_grouped_products

pytestmark = pytest.mark.gpu

HIDDEN, WIDTH, CHOSEN = 256, 128, 4


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize(("kind", "experts", "tokens"), [("qwen3_moe", 64, 7), ("gpt_oss", 8, 300)])
def test_grouped_products_equal_the_loop(kind: str, experts: int, tokens: int, separate: bool, device: str) -> None:
    """More experts than tokens, too, so that some have none; half of the tokens have no adapter."""
    index, factors = (tensor.to(device) for tensor in routing_of(2 * tokens, experts, CHOSEN))
    draw = torch.Generator().manual_seed(0)
    hidden, grad = (torch.randn(2 * tokens, HIDDEN, generator=draw).bfloat16().to(device) for _ in range(2))
    results: list[list[Tensor]] = []
    for compute, dtype in ((grouped.outputs, torch.bfloat16), (loops.outputs, torch.float32)):
        stack = stack_of(kind, experts, torch.bfloat16, HIDDEN, WIDTH)
        for name, parameter in stack.module.named_parameters():
            stack.module._parameters[name] = nn.Parameter(parameter.to(device, dtype), requires_grad=False)
        drawn = adapter_of(stack, 12, 1, torch.bfloat16, separate=separate)
        pairs, gradients = (
            {name: LoraPair(pair.a.to(device, to), pair.b.to(device, to)) for name, pair in each.items()}
            for each, to in ((drawn.pairs, dtype), (drawn.gradients, torch.float32))
        )
        leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in (hidden, factors.bfloat16())]
        placed = [(AdapterWeights(0.5, pairs, gradients), tokens, 2 * tokens)]
        output = compute(leaves[0], leaves[1], index, stack, placed)
        output.backward(grad.to(dtype))
        buffers = [part for pair in gradients.values() for part in (pair.a, pair.b)]
        results.append([output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None), *buffers])
    for actual, exact in zip(*results, strict=True):
        assert float((actual.float() - exact).norm() / exact.norm()) < 0.1  # rounding alone makes 0.05


def test_kernel_is_on_newer_cards(device: str) -> None:
    weight = torch.zeros(1, device=device, dtype=torch.bfloat16)
    newer = device == "cuda" and torch.cuda.get_device_capability()[0] in (9, 10)
    assert has_grouped_products(weight) == newer
