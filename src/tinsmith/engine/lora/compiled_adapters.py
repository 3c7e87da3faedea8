"""An adapter on a CPU, computed by `cpu.adapters` in place of PyTorch's products.

Those take 1.2 to 1.4 times as long for hundreds of positions, because one side of each is only as long as the rank, and
three times as long for few, because every product is a call of its own (benchmarks/NOTES.md).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from tinsmith.engine.cpu import openmp
from tinsmith.engine.cpu.instructions import has_pair_products
from tinsmith.engine.lora.adapter import AdapterWeights, LoraPair, PlacedAdapter
from tinsmith.engine.lora.adapter_groups import AdapterSlice

log = logging.getLogger(__name__)

MULTIPLE_RANK, MULTIPLE_WIDTH = 8, 32
"""What ranks and widths must be multiples of."""
CHECK_POSITIONS = 77
TOLERANCE = 3e-2
"""Error of results in the check, by the largest of them: bfloat16 rounds to 1/256 of a number, and more than once."""


@dataclass(frozen=True, slots=True)
class CompiledSlice(AdapterSlice):
    """One adapter at the packed positions start..stop, in bfloat16."""

    @classmethod
    def fits(cls, weights: AdapterWeights) -> bool:
        """Whether it computes adapters of this rank, where there are compiled functions."""
        first = next(iter(weights.pairs.values()), None)
        return first is not None and first.a.shape[-2] % MULTIPLE_RANK == 0

    @override
    def forward(self, inputs: Tensor, outputs: Sequence[Tensor], names: Sequence[str]) -> Tensor:
        """Add s B A x to the outputs; returns what the backward needs of A x, as `cpu.adapters` lays it out."""
        if not self._has_widths(names):
            return AdapterSlice.forward(self, inputs, outputs, names)
        from tinsmith.engine.cpu import adapters

        rows = self._rows(inputs)
        narrow = self._new_narrow(names, inputs) if self.has_gradients else inputs.new_empty(0)
        sites = self._sites(names, [self._rows(output) for output in outputs])
        kept = narrow if self.has_gradients else None
        self._call(adapters.forward_function, names, sites, inputs=_rows_of(rows), narrow=kept)
        return narrow

    @override
    def backward(
        self,
        input_grad: Tensor,
        grads: Sequence[Tensor],
        names: Sequence[str],
        inputs: Tensor | None,
        narrow: Tensor | None,
    ) -> None:
        """See `AdapterSlice`; `narrow` is what `forward` returned."""
        if not self._has_widths(names):
            AdapterSlice.backward(self, input_grad, grads, names, inputs, narrow)
            return
        from tinsmith.engine.cpu import adapters

        is_trained = inputs is not None and narrow is not None and self.has_gradients
        narrow_grads = self._new_narrow(names, input_grad) if is_trained else None
        rows = [_rows_of(self._rows(grad)) for grad in grads]
        sites = self._sites(names, rows, [self.weights.gradients[name] for name in names] if is_trained else ())
        self._call(adapters.backward_function, names, sites, input_grads=self._rows(input_grad),
                   narrow_grads=narrow_grads)  # fmt: skip
        if inputs is not None and is_trained:
            self._call(adapters.gradient_function, names, sites, inputs=_rows_of(self._rows(inputs)), narrow=narrow,
                       narrow_grads=narrow_grads)  # fmt: skip

    @override
    def narrow_of(self, inputs: Tensor, names: Sequence[str]) -> Tensor:
        """As `forward` returns it."""
        plain = AdapterSlice.narrow_of(self, inputs, names)
        if not self._has_widths(names):
            return plain
        rank = self.weights.pairs[names[0]].a.shape[0]
        padded = plain.new_zeros(len(plain) + len(plain) % 2, self._line(names))
        for number, piece in enumerate(plain.split(rank, dim=1)):
            padded[: len(plain), number * _slot(rank) :][:, :rank] = piece
        return padded.unflatten(0, (-1, 2)).transpose(1, 2).contiguous()

    def _has_widths(self, names: Sequence[str]) -> bool:
        pairs = [self.weights.pairs[name] for name in names]
        return not any(pair.a.shape[1] % MULTIPLE_WIDTH or pair.b.shape[0] % MULTIPLE_WIDTH for pair in pairs)

    def _line(self, names: Sequence[str]) -> int:
        """`cpu.adapters.ADAPTER`'s line."""
        rank = self.weights.pairs[names[0]].a.shape[0]
        return -(-len(names) * _slot(rank) // MULTIPLE_WIDTH) * MULTIPLE_WIDTH

    def _new_narrow(self, names: Sequence[str], like: Tensor) -> Tensor:
        return like.new_empty((self.stop - self.start + 1) // 2, self._line(names), 2)

    def _sites(self, names: Sequence[str], columns: Sequence[Tensor], gradients: Sequence[LoraPair] = ()) -> np.ndarray:
        """`cpu.adapters.SITE` of each projection with its outputs, or their gradients."""
        from tinsmith.engine.cpu import adapters

        buffers = [(pair.a.data_ptr(), pair.b.data_ptr()) for pair in gradients] or [(0, 0)] * len(names)
        pairs = [self.weights.pairs[name] for name in names]
        return np.array(
            [
                (wide.shape[1], *_matrix(wide), *_matrix(pair.a), *_matrix(pair.b), *buffer)
                for wide, pair, buffer in zip(columns, pairs, buffers, strict=True)
            ],
            adapters.SITE,
        )

    def _call(
        self,
        function: Callable[[], Any],
        names: Sequence[str],
        sites: np.ndarray,
        *,
        inputs: Tensor | None = None,
        input_grads: Tensor | None = None,
        narrow: Tensor | None = None,
        narrow_grads: Tensor | None = None,
    ) -> None:
        """Call a function with an ADAPTER."""
        from tinsmith.engine.cpu import adapters

        rows, (rank, width) = self.stop - self.start, self.weights.pairs[names[0]].a.shape
        kept = [0 if tensor is None else tensor.data_ptr() for tensor in (narrow, narrow_grads)]
        call = np.array(
            [
                (0, rows, width, rank, len(sites), sites.ctypes.data, self.weights.scale, *_matrix(inputs),
                 *_matrix(input_grads), *kept, self._line(names))
            ],
            adapters.ADAPTER,
        )  # fmt: skip
        threads = min(torch.get_num_threads(), -(-rows // adapters.BLOCK_ROWS))
        openmp.run(function(), call.ctypes.data, threads)


def _slot(rank: int) -> int:
    """`cpu.pairs.in_blocks`."""
    return -(-rank // 16) * 16


def _rows_of(tensor: Tensor) -> Tensor:
    """The tensor with the numbers of a row side by side."""
    return tensor if tensor.stride(1) == 1 else tensor.contiguous()


def _matrix(tensor: Tensor | None) -> tuple[int, int]:
    """Address, and numbers from one row to the next."""
    return (0, 0) if tensor is None else (tensor.data_ptr(), tensor.stride(0))


def one_adapter(placed: PlacedAdapter, *, compiled: bool) -> AdapterSlice:
    """An adapter at its positions, computed by compiled functions if these work and fit."""
    kind = CompiledSlice if compiled and CompiledSlice.fits(placed[0]) else AdapterSlice
    return kind(*placed)


def work_on(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether compiled functions compute adapters of this dtype on this device, and give the results of products."""
    if not has_pair_products(device, dtype):
        return False
    try:
        check()
    except Exception:
        log.warning("The compiled adapters do not work here; all is slower without them.", exc_info=True)
        return False
    return True


def check() -> None:
    """Raises ValueError unless results are those of products."""
    compiled, expected = _results(CompiledSlice), _results(AdapterSlice)
    errors = [
        float((left - right).abs().max() / right.abs().max()) for left, right in zip(compiled, expected, strict=True)
    ]
    if not max(errors) < TOLERANCE:
        raise ValueError(f"results are wrong by {max(errors):.2g}")


def _results(kind: type[AdapterSlice]) -> list[Tensor]:
    """Outputs and gradients of two small projections."""
    draw = torch.Generator().manual_seed(0)
    names, rank, width = ("left", "right"), 24, MULTIPLE_WIDTH
    shapes = [(rank, width), (width, rank)]

    def number(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    pairs = {name: LoraPair(*(number(*shape).bfloat16() for shape in shapes)) for name in names}
    gradients = {name: LoraPair(*(torch.zeros(shape, device="cpu") for shape in shapes)) for name in names}
    adapter = kind(AdapterWeights(0.5, pairs, gradients), 1, CHECK_POSITIONS + 1)
    inputs, left, right, input_grad = (number(CHECK_POSITIONS + 2, width).bfloat16() for _ in range(4))
    narrow = adapter.forward(inputs, (left, right), names)
    adapter.backward(input_grad, (left, right), names, inputs, narrow)
    buffers = [buffer for name in names for buffer in (gradients[name].a, gradients[name].b)]
    return [tensor.float() for tensor in (left, right, input_grad, *buffers)]
