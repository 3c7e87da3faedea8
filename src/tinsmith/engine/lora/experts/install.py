"""Computes the experts of a mixture with LoRA adapters of many tenants added, in place of transformers' own.

`install` registers one function with transformers, which calls it in place of a model's own experts. For a token x with
chosen experts e of weights w_e:

    g_e = G_e x + s B1_e A1 x     u_e = U_e x + s B3_e A3 x     h_e = the model's own gate of (g_e, u_e)
    y = sum_e w_e D_e h_e + s B2 sum_e w_e A2_e h_e

A1, A3 and B2, on the side of the hidden size, are one matrix for all experts; B1, B3 and A2 are one for each. Adapters
whose experts share no matrix are computed too (`separate`). Pairs of a token and an expert are sorted by expert and,
within an expert, by adapter. `grouped` computes them on GPUs that multiply all experts in one kernel, `compiled` on
CPUs that are fastest with pairs of bfloat16 numbers, `loops` elsewhere: expert by expert, or in one batched product
where each has few pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from tinsmith.engine.lora.experts import compiled, grouped, loops
from tinsmith.engine.lora.experts.stack import ExpertStack, Placement, stack_of
from tinsmith.engine.model.support import HINT, is_expert_stack
from tinsmith.errors import Unsupported

IMPLEMENTATION = "tinsmith"
"""Name of the function in transformers' registry."""

TOLERANCE = 2e-2
"""Mean error of a stack at load in units of the standard deviation: bfloat16 rounds by 3e-3."""


def install(model: PreTrainedModel, active: Placement) -> list[ExpertStack]:
    """Compute a model's experts here; returns the stack of each layer with experts, in order.

    Experts that compute more than the formula above, or outside transformers' interface, keep their own code.
    """
    modules = [(name, module) for name, module in model.named_modules() if is_expert_stack(module)]
    if not modules:
        return []
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, expert_outputs)
    stacks = []
    for name, module in modules:
        stack = ExpertStack(module, name, active)
        module.__dict__["stack"] = stack  # no child of the module: it holds the module itself
        stacks.append(stack)
    _check(stacks)
    model.set_experts_implementation(IMPLEMENTATION)
    return stacks


@torch.no_grad()
def _check(stacks: Sequence[ExpertStack]) -> None:
    """Raises Unsupported unless the first stack of each class computes what the class itself does."""
    for stack in {type(stack.module): stack for stack in reversed(stacks)}.values():
        draw, weight = torch.Generator().manual_seed(0), stack.down_weights[0]
        hidden = torch.randn(4, stack.hidden, generator=draw).to(weight)
        index = torch.arange(8, device=weight.device).remainder(stack.count).view(4, 2)
        weights = torch.rand(4, 2, generator=draw).to(weight)
        expected = stack.module(hidden, index, weights).float()
        error = (expert_outputs(stack.module, hidden, index, weights).float() - expected).abs().mean() / expected.std()
        if not error < TOLERANCE:
            raise Unsupported(f"{type(stack.module).__name__} computes its experts in an unsupported way.", HINT)


def expert_outputs(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Weighted sums of the chosen experts' outputs: hidden [T, D], expert ids and weights [T, k] -> [T, D].

    The signature of transformers' interface.
    """
    stack = stack_of(module)
    placed = [entry for entry in stack.active.placed if stack.down_name in entry[0].pairs]
    if compiled.serves(stack, placed):
        return compiled.outputs(hidden, weights, index, stack, placed)
    compute = grouped.outputs if grouped.serves(stack) else loops.outputs
    return compute(hidden, weights, index, stack, placed)
