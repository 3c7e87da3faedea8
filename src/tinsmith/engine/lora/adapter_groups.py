"""Some of a pass's adapters, computed together: forward and backward written by hand.

A slice is one adapter; a batch are many with few positions each, as batched products over stacked matrices: 64 tenants
with 16 tokens each would otherwise need 80,000 tiny products for a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

from tinsmith.engine.lora.adapter import AdapterWeights


class AdapterGroup(Protocol):
    """Some of a pass's adapters, computed together."""

    @property
    def has_gradients(self) -> bool: ...

    def has(self, name: str) -> bool: ...

    def forward(self, inputs: Tensor, outputs: Sequence[Tensor], names: Sequence[str]) -> Tensor: ...

    def backward(
        self,
        input_grad: Tensor,
        grads: Sequence[Tensor],
        names: Sequence[str],
        inputs: Tensor | None,
        narrow: Tensor | None,
    ) -> None: ...


AdapterGroups = Sequence[AdapterGroup]


@dataclass(frozen=True, slots=True)
class AdapterSlice:
    """One adapter at the packed positions start..stop."""

    weights: AdapterWeights
    start: int
    stop: int

    @property
    def has_gradients(self) -> bool:
        return bool(self.weights.gradients)

    def has(self, name: str) -> bool:
        """Whether the adapter covers the projection."""
        return name in self.weights.pairs

    def forward(self, inputs: Tensor, outputs: Sequence[Tensor], names: Sequence[str]) -> Tensor:
        """Add s B A x to the outputs; returns A x of all projections [positions, projections * rank]."""
        narrow = self.narrow_of(inputs, names)
        pieces = narrow.chunk(len(names), dim=1) if len(names) > 1 else (narrow,)
        for name, output, piece in zip(names, outputs, pieces, strict=True):
            self._rows(output).addmm_(piece, self.weights.pairs[name].b.T, alpha=self.weights.scale)
        return narrow

    def narrow_of(self, inputs: Tensor, names: Sequence[str]) -> Tensor:
        """A x of all projections [positions, projections * rank]."""
        return linear(self._rows(inputs), self.weights.stacked_a(names))

    def backward(
        self,
        input_grad: Tensor,
        grads: Sequence[Tensor],
        names: Sequence[str],
        inputs: Tensor | None,
        narrow: Tensor | None,
    ) -> None:
        """Add to the gradient of the inputs and, if `inputs` and `narrow` are given, to the adapter's gradients."""
        weights, rows = self.weights, slice(self.start, self.stop)
        # Results with the long side last and the rank first: in the other order they take up to six times as long on
        # CPUs, which vectorize the last side.
        pieces = [weights.pairs[name].b.T @ grad[rows].T for name, grad in zip(names, grads, strict=True)]
        narrow_grad = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        input_grad[rows].addmm_(narrow_grad.T, weights.stacked_a(names), alpha=weights.scale)
        if inputs is None or narrow is None or not self.has_gradients:
            return
        a_grads = (narrow_grad @ inputs[rows]).chunk(len(names))
        for name, grad, a_grad, piece in zip(names, grads, a_grads, narrow.chunk(len(names), dim=1), strict=True):
            buffer = weights.gradients[name]
            buffer.a.add_(a_grad, alpha=weights.scale)
            buffer.b.T.add_(piece.T @ grad[rows], alpha=weights.scale)

    def _rows(self, flat: Tensor) -> Tensor:
        """The adapter's rows; no view if these are all rows, because a decoding step would create thousands of
        views.
        """
        return flat if self.stop - self.start == len(flat) else flat[self.start : self.stop]


@dataclass(frozen=True, slots=True)
class AdapterBatch:
    """n adapters of one shape with up to L positions each, computed as batched products.

    Adapters with fewer positions are padded with copies of their last position, whose contribution is zero.
    """

    weights: tuple[AdapterWeights, ...]
    length: int
    """L."""
    start: int
    """The first adapter's first position."""
    padding: Padding | None
    """None if nothing is padded and the positions are contiguous."""

    @property
    def has_gradients(self) -> bool:
        return any(weights.gradients for weights in self.weights)

    def has(self, name: str) -> bool:
        """Whether the adapters cover the projection."""
        return name in self.weights[0].pairs

    def forward(self, inputs: Tensor, outputs: Sequence[Tensor], names: Sequence[str]) -> Tensor:
        """Add s B A x to the outputs [T, out]; returns A x of all projections [n, projections * rank, L]."""
        narrow = torch.bmm(self._stacked_a(names), self._gather(inputs).mT)
        for name, output, piece in zip(names, outputs, narrow.chunk(len(names), dim=1), strict=True):
            self._add_product(output, piece.mT, self._stacked_b(name).mT)
        return narrow

    def backward(
        self,
        input_grad: Tensor,
        grads: Sequence[Tensor],
        names: Sequence[str],
        inputs: Tensor | None,
        narrow: Tensor | None,
    ) -> None:
        """Add to the gradient of the inputs and, if `inputs` and `narrow` are given, to the adapters' gradients."""
        gathered = [self._gather(grad) for grad in grads]
        if self.padding is not None:
            gathered = [grad * self.padding.mask for grad in gathered]
        pieces = [torch.bmm(self._stacked_b(name).mT, grad.mT) for name, grad in zip(names, gathered, strict=True)]
        narrow_grad = torch.cat(pieces, dim=1)
        self._add_product(input_grad, narrow_grad.mT, self._stacked_a(names))
        if inputs is None or narrow is None or not self.has_gradients:
            return
        a_grads = torch.bmm(narrow_grad, self._gather(inputs)).chunk(len(names), dim=1)
        for name, grad, a_grad, piece in zip(names, gathered, a_grads, narrow.chunk(len(names), dim=1), strict=True):
            self._accumulate(name, a_grad, torch.bmm(piece, grad).mT)

    def _accumulate(self, name: str, a_grads: Tensor, b_grads: Tensor) -> None:
        """Add gradients [n, rank, in] and [n, out, rank] to the adapters that have gradient buffers."""
        buffers, grads = [], []
        if a_grads.device.type != "cpu":  # one kernel adds to all buffers, but only gradients of their dtype and order
            a_grads, b_grads = a_grads.float(), b_grads.float().contiguous()
        for weights, a_grad, b_grad in zip(self.weights, a_grads, b_grads, strict=True):
            if weights.gradients:
                buffers += [weights.gradients[name].a, weights.gradients[name].b]
                grads += [a_grad, b_grad]
        torch._foreach_add_(buffers, grads, alpha=self.weights[0].scale)  # pyright: ignore[reportPrivateImportUsage]

    def _stacked_a(self, names: Sequence[str]) -> Tensor:
        return torch.stack([weights.stacked_a(names) for weights in self.weights])

    def _stacked_b(self, name: str) -> Tensor:
        return torch.stack([weights.pairs[name].b for weights in self.weights])

    def _gather(self, flat: Tensor) -> Tensor:
        """[T, D] -> [n, L, D]."""
        return self._window(flat) if self.padding is None else flat[self.padding.index]

    def _add_product(self, flat: Tensor, left: Tensor, right: Tensor) -> None:
        """Add s times the products of `left` [n, L, k] and `right` [n, k, D] to `flat` [T, D]."""
        scale = self.weights[0].scale
        if self.padding is None:
            self._window(flat).baddbmm_(left, right, alpha=scale)
        else:
            values = torch.bmm(left, right).flatten(0, 1).index_select(0, self.padding.places)
            flat.index_add_(0, self.padding.positions, values, alpha=scale)

    def _window(self, flat: Tensor) -> Tensor:
        count = len(self.weights)
        return flat[self.start : self.start + count * self.length].view(count, self.length, flat.shape[1])


@dataclass(frozen=True, slots=True)
class Padding:
    """Where the P positions of n adapters are among the n * L of a batch; on the device, so that no pass reads them."""

    index: Tensor
    """int64 [n, L]: packed positions, padding included."""
    mask: Tensor
    """bool [n, L, 1]: False for padding."""
    places: Tensor
    """int64 [P]: the positions in the flattened [n, L]."""
    positions: Tensor
    """int64 [P]: the packed positions."""
