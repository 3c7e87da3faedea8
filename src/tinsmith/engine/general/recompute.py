"""Activation checkpointing on the general path: a decoder layer of transformers keeps its inputs only, and computes the
rest again in the backward.

PyTorch's own checkpointing does it, because layers take and return what their model wants. A layer computed again needs
the adapters of its first time, though the pass may have gone on to others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tinsmith.engine.general.model import GeneralModel
from tinsmith.engine.training.activation_checkpointing import CheckpointSwitch
from tinsmith.errors import Unsupported
from tinsmith.plurals import counted


def install(base: GeneralModel, *, required: bool) -> CheckpointSwitch:
    """Let every decoder layer recompute while the switch, which is off, is on.

    Raises Unsupported if recomputing is required and the model keeps its layers in an unknown way.
    """
    switch = CheckpointSwitch()
    count = base.model.config.get_text_config().num_hidden_layers
    layers = [layer for stack in _stacks(base.body, count) for layer in stack]
    if required and not layers:
        raise Unsupported(
            f"{base.card.source} ({base.card.arch}) has no list of {counted(count, 'layer')}; none can be recomputed.",
            "Serve it without recompute=always.",
        )
    for layer in layers:
        layer.forward = _recomputing(layer.forward, base, switch)
    return switch


def _recomputing(forward: Callable[..., Any], base: GeneralModel, switch: CheckpointSwitch) -> Callable[..., Any]:
    def recomputing(*args: Any, **settings: Any) -> Any:
        if not (switch.on and torch.is_grad_enabled()):
            return forward(*args, **settings)
        placed = base.placed
        return checkpoint(
            forward,
            *args,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=lambda: (nullcontext(), base.serving(placed)),
            **settings,
        )

    return recomputing


def _stacks(module: nn.Module, count: int) -> Iterator[nn.ModuleList]:
    """The outermost lists of `count` modules."""
    for child in module.children():
        if isinstance(child, nn.ModuleList) and len(child) == count:
            yield child
        else:
            yield from _stacks(child, count)
