"""What the tests of the output head run in the process of the stand-in device."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.engine.device import stand_in
from tinsmith.engine.lora import lm_head
from tinsmith.engine.lora.adapter import AdapterWeights, LoraPair, PlacedAdapter
from tinsmith.engine.lora.head import softmax
from tinsmith.engine.lora.head.blocks import PackedTargets
from tinsmith.engine.lora.lm_head import LMHead, ScoreGrads
from tinsmith.engine.model_parts import HEAD

WIDTH, WORDS, RANK = 16, 700, 2
_FEW_VALUES = {"aten.detach", "aten.t", "aten.new_empty", "aten.empty_like", "aten.slice", "aten.index"}
"""Operators that read and write no more than the targets' values of a matrix."""


@dataclass(frozen=True, slots=True)
class Case:
    """Positions that all have a target, of which two in three have a gradient, on a device."""

    weight: Tensor
    hidden: Tensor
    placed: list[PlacedAdapter]
    targets: PackedTargets
    grad_mask: np.ndarray
    grads: ScoreGrads

    @classmethod
    def of(cls, device: torch.device, dtype: torch.dtype, length: int, tenants: int) -> Case:
        draw = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw)

        placed: list[PlacedAdapter] = []
        edges = np.linspace(0, length, tenants + 1).astype(int).tolist()
        for start, stop in pairwise(edges):
            pair = LoraPair(normal(RANK, WIDTH).to(device), normal(WORDS, RANK).to(device))
            gradient = LoraPair(torch.zeros_like(pair.a), torch.zeros_like(pair.b))
            placed.append((AdapterWeights(0.5, {HEAD: pair}, {HEAD: gradient}), start, stop))
        targets = PackedTargets(np.arange(length), np.random.default_rng(0).integers(0, WORDS, length))
        grad_mask = np.arange(length) % 3 > 0
        grads = [(normal(length) * torch.as_tensor(grad_mask)).to(device) for _ in range(2)]
        weight, hidden = normal(WORDS, WIDTH).to(dtype).to(device), normal(length, WIDTH).to(dtype).to(device)
        return cls(weight, hidden, placed, targets, grad_mask, ScoreGrads(*grads))

    def results(self, head: LMHead) -> list[Tensor]:
        """Scores and all gradients."""
        scored = head.score(self.hidden, self.placed, self.targets, self.grad_mask, entropies=True)
        hidden_grad = head.backward(self.hidden, scored, self.grads)
        buffers = [weights.gradients[HEAD] for weights, _, _ in self.placed]
        assert scored.entropies is not None
        return [
            scored.logprobs,
            scored.entropies,
            hidden_grad,
            *(part for pair in buffers for part in (pair.a, pair.b)),
        ]


class Operators(TorchDispatchMode):
    """Records operators on float32 matrices of the device that are as wide as the vocabulary, or as the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.of_logits: list[str] = []
        self.widens_weights = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves([args, result]) if isinstance(leaf, stand_in.DeviceTensor)]
        shapes = [tuple(tensor.shape) for tensor in tensors if tensor.dtype == torch.float32]
        name = str(func).rpartition(".")[0]
        if name not in _FEW_VALUES and any(len(shape) == 2 and shape[1] == WORDS for shape in shapes):
            self.of_logits.append(name)
        self.widens_weights |= (WORDS, WIDTH) in shapes or (WIDTH, WORDS) in shapes
        return result


def costs(dtype: torch.dtype, length: int, tenants: int, rows: int) -> tuple[int, int, float]:
    """Reads and uploads on the device, and the largest difference from the CPU's results, relative to their norms."""
    expected, actual = (Case.of(device, dtype, length, tenants) for device in (torch.device("cpu"), stand_in.install()))
    head = LMHead(actual.weight, rows=rows)
    with stand_in.counting() as counts:
        results = actual.results(head)
    pairs = zip(results, expected.results(LMHead(expected.weight, rows=rows)), strict=True)
    differences = [float((left.cpu() - right).float().norm() / right.float().norm()) for left, right in pairs]
    return counts.reads.total(), counts.uploads.total(), max(differences)


def operators_on_logits(dtype: torch.dtype, length: int) -> tuple[list[str], bool]:
    """Operators on all logits of a block in `score`, and whether the weights became float32; the head has a kernel."""
    case, operators = Case.of(stand_in.install(), dtype, length, 0), Operators()

    def kernel(logits: Tensor, *, entropies: bool, probs: torch.dtype | None) -> softmax.SoftmaxRows:
        operators.of_logits.append("kernel")
        sums = torch.zeros(len(logits), device=logits.device)
        return softmax.SoftmaxRows(sums, sums, None if probs is None else torch.empty_like(logits, dtype=probs))

    with patch.object(lm_head, "softmax_on", lambda _: kernel), operators:
        LMHead(case.weight).score(case.hidden, [], case.targets, case.grad_mask, entropies=True)
    return operators.of_logits, operators.widens_weights
