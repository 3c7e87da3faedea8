"""Activation checkpointing: layers save only their input and recompute the rest in the backward.

Costs a third more compute and saves nine tenths of the memory. Simpler than PyTorch's own checkpointing, because a
forward here uses no random numbers and no autocast whose state would have to be restored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from tinsmith.engine.model.base_model import BaseModel
from tinsmith.engine.threads.state import ThreadState


@dataclass(slots=True)
class _Setting:
    on: bool = False


class CheckpointSwitch:
    """Turns recomputation on and off in the current thread. All layers of a base model share one switch."""

    def __init__(self) -> None:
        self._setting = ThreadState(_Setting)

    @property
    def on(self) -> bool:
        """Whether layers recompute."""
        return self._setting.now.on

    @contextmanager
    def set(self, on: bool) -> Iterator[None]:
        """Set the switch for forward and backward within the context."""
        setting = self._setting.own
        setting.on, previous = on, setting.on
        try:
            yield
        finally:
            setting.on = previous


class CheckpointedLayer(nn.Module):
    """A decoder layer that recomputes its activations while the switch is on."""

    def __init__(self, layer: nn.Module, switch: CheckpointSwitch) -> None:
        super().__init__()
        self.layer, self.switch = layer, switch

    @override
    def forward(self, hidden_states: Tensor, *inputs: Any, **settings: Any) -> Tensor:
        if not (self.switch.on and torch.is_grad_enabled()):
            return self.layer(hidden_states, *inputs, **settings)
        if not inputs:
            return _Recompute.apply(hidden_states, self.layer, settings)  # type: ignore[no-any-return]
        # Layers with further inputs, as Gemma 4's, also pass keys and values on to each other, with their gradients.
        return checkpoint(  # type: ignore[no-any-return]
            self.layer, hidden_states, *inputs, use_reentrant=False, preserve_rng_state=False, **settings
        )


class _Recompute(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, inputs: Tensor, layer: nn.Module, settings: Mapping[str, Any]) -> Tensor:
        ctx.save_for_backward(inputs)
        ctx.layer, ctx.settings = layer, settings
        with torch.no_grad():
            return layer(inputs, **settings)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None]:
        leaf = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.layer(leaf, **ctx.settings)
        output.backward(grads[0])
        return leaf.grad, None, None


def install(base: BaseModel) -> CheckpointSwitch:
    """Wrap every decoder layer of the base; returns the switch, which is off."""
    switch = CheckpointSwitch()
    stacks = [module for module in base.body.children() if isinstance(module, nn.ModuleList)]
    for stack in stacks:
        for number, layer in enumerate(stack):
            stack[number] = CheckpointedLayer(layer, switch)
    return switch
