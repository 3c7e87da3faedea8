"""The choice between PyTorch's operators and Triton kernels for the gated delta rule of a pass."""

from __future__ import annotations

import logging
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine.model.hybrid.chunk_rule import ChunkRule, HeadShape, chunk_rule
from tinsmith.engine.model.hybrid.chunk_tensors import ChunkTensors
from tinsmith.engine.model.hybrid.chunk_tree import chunk_tree
from tinsmith.engine.model.hybrid.rule.fused import RuleKernels, fused_rule
from tinsmith.engine.triton_support import runs_triton

log = logging.getLogger(__name__)

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1e-2, torch.float16: 1e-2}
"""Mean error in units of the standard deviation, by the dtype that is rounded to."""
STEMS = (3, 20, 70)
"""Tokens before the fork of a checked tree: chunks of 8, 32 and 64."""


def rule_on(device: torch.device, dtype: torch.dtype, shape: HeadShape) -> ChunkRule:
    """The fastest that works on this device for heads of this shape, of values of `dtype`."""
    try:
        kernels = kernels_on(device)
        if kernels is None:
            return chunk_rule
        for stem in STEMS:
            check(kernels, device, dtype, shape, stem)
    except Exception:
        log.warning("The kernels of Gated DeltaNet do not work here; its layers are slower.", exc_info=True)
        return chunk_rule
    return partial(fused_rule, kernels)


def kernels_on(device: torch.device) -> RuleKernels | None:
    """The kernels for this device, unchecked; None if there are none."""
    if not runs_triton(device):
        return None
    from tinsmith.engine.model.hybrid.rule import kernels  # Triton is where GPUs are

    return kernels


def check(kernels: RuleKernels, device: torch.device, dtype: torch.dtype, shape: HeadShape, stem: int) -> None:
    """Raises ValueError unless outputs, states and gradients are those of `chunk_rule` on the CPU.

    The tree is two rows that share `stem` tokens, and one that starts from a state outside the pass.
    """
    count, fork = 4 * stem, 2 * stem + 1
    parents = np.arange(count) - 1
    parents[[fork, 3 * stem]] = stem - 1, -1
    tree = chunk_tree(parents, 1, starts={3 * stem: 0}, ends=[fork - 1, count - 1])
    draw = torch.Generator().manual_seed(stem)
    channels = 2 * shape.keys + shape.value_heads * shape.value_width
    tokens = torch.randn(count, channels, generator=draw).to(dtype)
    decay, beta = (
        -torch.rand(count, shape.value_heads, generator=draw),
        torch.rand(count, shape.value_heads, generator=draw),
    )
    outside = torch.randn(1, shape.value_heads, shape.key_width, shape.value_width, generator=draw)

    def results(rule: ChunkRule, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        tensors = ChunkTensors.of(tree, device)
        leaves = [
            part.to(device, kind).requires_grad_() for part, kind in ((tokens, dtype), (decay, None), (beta, dtype))
        ]
        with torch.enable_grad():
            slots = leaves[0].index_select(0, tensors.inputs).view(-1, tensors.size, channels)
            outputs = rule(slots, leaves[1], leaves[2], shape, tensors, outside.to(device))
            grads = [_drawn(number, output).to(device) for number, output in enumerate(outputs)]
            return [part.detach().float().cpu() for part in (*outputs, *torch.autograd.grad(outputs, leaves, grads))]

    beta = beta.to(dtype).float()
    actual = results(partial(fused_rule, kernels), device, dtype)
    expected = results(chunk_rule, torch.device("cpu"), torch.float32)
    names = {"outputs": torch.float32, "states": torch.float32, "inputs": dtype, "decays": torch.float32, "beta": dtype}
    for (name, kind), result, wanted in zip(names.items(), actual, expected, strict=True):
        error = (result - wanted).abs().mean() / wanted.std().clamp(min=1e-6)
        if not error <= TOLERANCE[kind]:
            raise ValueError(f"kernels of Gated DeltaNet: {name} differ by {float(error)} of their scale")


def _drawn(seed: int, like: Tensor) -> Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed))
