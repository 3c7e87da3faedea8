"""Layers that keep their input alone and compute the rest again in the backward: a third more work, a tenth of memory.

Ours and not PyTorch's checkpointing: a forward here has no random numbers and no autocast to bring back, so that a
function of one input does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tinsmith.engine.model.loading import BaseModel


class Switch:
    """Whether the pass at hand recomputes; all layers of a base look at one."""

    def __init__(self) -> None:
        self.on = False

    @contextmanager
    def set(self, on: bool) -> Iterator[None]:
        """For the passes made inside, their backward included."""
        self.on, before = on, self.on
        try:
            yield
        finally:
            self.on = before


class Layer(nn.Module):
    """A decoder layer that recomputes when the switch is on."""

    def __init__(self, layer: nn.Module, switch: Switch) -> None:
        super().__init__()
        self.layer, self.switch = layer, switch

    def forward(self, hidden_states: Tensor, **settings: Any) -> Tensor:
        if self.switch.on and torch.is_grad_enabled():
            return _Again.apply(hidden_states, self.layer, settings)  # type: ignore[no-any-return]
        return self.layer(hidden_states, **settings)


class _Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, layer: nn.Module, settings: Mapping[str, Any]) -> Tensor:
        ctx.save_for_backward(inputs)
        ctx.layer, ctx.settings = layer, settings
        with torch.no_grad():
            return layer(inputs, **settings)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None]:
        leaf = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.layer(leaf, **ctx.settings)
        output.backward(grads[0])
        return leaf.grad, None, None


def install(base: BaseModel) -> Switch:
    """Wrap every decoder layer of the base; the switch is off."""
    switch = Switch()
    stacks = [module for module in base.body.children() if isinstance(module, nn.ModuleList)]
    for stack in stacks:
        for number, layer in enumerate(stack):
            stack[number] = Layer(layer, switch)
    return switch
