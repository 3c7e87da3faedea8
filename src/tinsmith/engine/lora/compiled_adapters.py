"""Adapters on a CPU, computed by `cpu.projections`, in one call with the frozen matrices that are laid out as panels.

PyTorch's products take 1.2 to 1.4 times as long for hundreds of positions, because one side of each is only as long as
the rank, and three times as long for few, because every product is a call of its own (benchmarks/NOTES.md).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from tinsmith.engine.cpu.instructions import panel_kind
from tinsmith.engine.load_checks import LoadChecks
from tinsmith.engine.lora.adapter import AdapterWeights, LoraPair, PlacedAdapter
from tinsmith.engine.lora.adapter_groups import AdapterGroups, AdapterSlice
from tinsmith.engine.lora.compiled_projections import (
    MULTIPLE_WIDTH,
    AdapterTables,
    Panels,
    ProjectionCall,
    fit,
    narrow_line,
    narrow_slot,
    rows_of,
)

log = logging.getLogger(__name__)

MULTIPLE_RANK = 8
"""What ranks of bfloat16 adapters must be multiples of."""
CHECK_POSITIONS = 77
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
"""Error of results in the check, by the largest of them: bfloat16 rounds to 1/256 of a number, and more than once."""


class CompiledAdapters:
    """Adapters of the same modules, each at its packed positions."""

    def __init__(self, placed: Sequence[PlacedAdapter]) -> None:
        self._placed = tuple(sorted(placed, key=lambda entry: entry[1]))
        self._tables = dict[tuple[str, ...], AdapterTables]()

    @property
    def has_gradients(self) -> bool:
        return any(weights.gradients for weights, _, _ in self._placed)

    def has(self, name: str) -> bool:
        """Whether the adapters cover the projection."""
        return name in self._placed[0][0].pairs

    def is_of(self, placed: Sequence[PlacedAdapter]) -> bool:
        """Whether these are the adapters, by rows."""
        return self._placed == tuple(placed)

    def forward(
        self,
        inputs: Tensor,
        outputs: Sequence[Tensor],
        names: Sequence[str],
        panels: Sequence[Panels] | None = None,
    ) -> Tensor:
        """Add s B A x to the outputs, which are filled first with the products of `panels` where these are given;
        returns what the backward needs of A x, as `cpu.projections` lays it out."""
        tables = self.tables_of(names)
        narrow = inputs.new_empty(tables.narrow_size if self.has_gradients else 0)
        ProjectionCall(rows_of(inputs), outputs, panels, tables).fill_outputs(narrow)
        return narrow

    def backward(
        self,
        input_grad: Tensor,
        grads: Sequence[Tensor],
        names: Sequence[str],
        inputs: Tensor | None,
        narrow: Tensor | None,
        panels: Sequence[Panels] | None = None,
    ) -> None:
        """Add to the gradient of the inputs, or fill it where `panels` are given; if `inputs` and `narrow` are, add to
        the adapters' gradients too."""
        tables, grads = self.tables_of(names), [rows_of(grad) for grad in grads]
        call = ProjectionCall(input_grad, grads, panels, tables)
        if inputs is None or narrow is None or not self.has_gradients:
            call.fill_input_grads(adds=panels is None)
            return
        narrow_grads = input_grad.new_empty(tables.narrow_size)
        call.fill_input_grads(narrow_grads, adds=panels is None)
        ProjectionCall(rows_of(inputs), grads, None, tables).add_gradients(narrow, narrow_grads)

    def narrow_of(self, inputs: Tensor, names: Sequence[str]) -> Tensor:
        """What `forward` returns, without outputs."""
        pieces = []
        for weights, start, stop in self._placed:
            rank = weights.pairs[names[0]].a.shape[0]
            rows = inputs.new_zeros(stop - start, narrow_line(len(names), rank))
            for number, name in enumerate(names):
                first = number * narrow_slot(rank)
                rows[:, first : first + rank] = inputs[start:stop] @ weights.pairs[name].a.T
            pieces.append(rows.flatten())
        return torch.cat(pieces)

    def tables_of(self, names: Sequence[str]) -> AdapterTables:
        """The tables at projections that share an input."""
        key = tuple(names)
        if key not in self._tables:
            self._tables[key] = AdapterTables.of(self._placed, key)
        return self._tables[key]


def compiled_groups(
    placed: Sequence[PlacedAdapter], before: Sequence[CompiledAdapters] = ()
) -> tuple[list[CompiledAdapters], list[PlacedAdapter]]:
    """Adapters in a group for each set of modules, and those of ranks that compiled functions do not compute. Groups of
    the pass before that are the same are used again, with their tables."""
    groups, others = dict[tuple[str, ...], list[PlacedAdapter]](), list[PlacedAdapter]()
    for entry in placed:
        if fits(entry[0]):
            groups.setdefault(tuple(entry[0].pairs), []).append(entry)
        else:
            others.append(entry)
    return [
        next((group for group in before if group.is_of(members)), None) or CompiledAdapters(members)
        for members in groups.values()
    ], others


def fits(weights: AdapterWeights) -> bool:
    """Whether compiled functions compute adapters of this rank."""
    first = next(iter(weights.pairs.values()), None)
    return first is not None and is_rank(first.a.shape[-2], first.a.dtype)


def is_rank(rank: int, dtype: torch.dtype) -> bool:
    """Whether compiled functions compute adapters of this rank and dtype."""
    return dtype == torch.float32 or rank % MULTIPLE_RANK == 0


def work_on(
    device: torch.device, dtype: torch.dtype, widths: Iterable[int] = (), checks: LoadChecks | None = None
) -> bool:
    """Whether compiled functions compute projections of this dtype and these widths on this device, with their
    adapters, and give the results of products, by the `checks` of a model."""
    if panel_kind(device, dtype) is None or not fit(widths):
        return False
    checks, name = checks or LoadChecks(), f"compiled adapters in {dtype}"
    outputs, gradients = (partial(_works, dtype, gradients=each) for each in (False, True))
    return checks.result(name, outputs) and checks.gradients_result(f"gradients of {name}", gradients)


def project(
    inputs: Tensor, panels: Sequence[Panels], groups: AdapterGroups, names: Sequence[str]
) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs of projections under some adapters, and A x of each group: the first one that is compiled in the call
    of the projections."""
    outputs, own = [inputs.new_empty(len(inputs), matrix.shape[0]) for matrix in panels], _first(groups)
    if own is None:
        ProjectionCall(rows_of(inputs), outputs, panels, None).fill_outputs()
        return outputs, [group.forward(inputs, outputs, names) for group in groups]
    narrow = own.forward(inputs, outputs, names, panels)
    return outputs, [narrow if group is own else group.forward(inputs, outputs, names) for group in groups]


def project_back(
    grads: Sequence[Tensor],
    panels: Sequence[Panels],
    groups: AdapterGroups,
    names: Sequence[str],
    inputs: Tensor | None,
    narrow: Sequence[Tensor | None],
) -> Tensor:
    """The gradient of the inputs; adds to those of the adapters if their `inputs` and `narrow` are given."""
    own, input_grad = _first(groups), grads[0].new_empty(len(grads[0]), panels[0].shape[1])
    if own is None:
        ProjectionCall(input_grad, [rows_of(grad) for grad in grads], panels, None).fill_input_grads(adds=False)
    else:
        own.backward(input_grad, grads, names, inputs, narrow[groups.index(own)], panels)
    for group, of_group in zip(groups, narrow, strict=True):
        if group is not own:
            group.backward(input_grad, grads, names, inputs, of_group)
    return input_grad


def _first(groups: AdapterGroups) -> CompiledAdapters | None:
    return next((group for group in groups if isinstance(group, CompiledAdapters)), None)


def _works(dtype: torch.dtype, *, gradients: bool) -> bool:
    try:
        check(dtype, gradients=gradients)
    except Exception:
        log.warning("The compiled adapters do not work here; all is slower without them.", exc_info=True)
        return False
    return True


def check(dtype: torch.dtype, *, gradients: bool = True) -> None:
    """Raises ValueError unless results, or gradients too, are those of products."""
    errors = [
        float((left - right).abs().max() / right.abs().max())
        for left, right in zip(*(_results(dtype, gradients, compiled=each) for each in (True, False)), strict=True)
    ]
    if not max(errors) < TOLERANCES[dtype]:
        raise ValueError(f"results are wrong by {max(errors):.2g}")


def _results(dtype: torch.dtype, gradients: bool, *, compiled: bool) -> list[Tensor]:
    """Outputs of two small projections with an adapter, and their gradients."""
    draw = torch.Generator().manual_seed(0)
    names, rank, width, columns = ("left", "right"), 24, MULTIPLE_WIDTH, 2 * MULTIPLE_WIDTH

    def number(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).bfloat16().to(dtype)

    matrices, bias = [number(columns, width) for _ in names], number(columns)
    shapes = [(rank, width), (columns, rank)]
    pairs = {name: LoraPair(*(number(*shape) for shape in shapes)) for name in names}
    sums = {name: LoraPair(*(torch.zeros(shape, device="cpu") for shape in shapes)) for name in names}
    placed = AdapterWeights(0.5, pairs, sums), 1, CHECK_POSITIONS + 1
    inputs, *grads = (number(CHECK_POSITIONS + 2, size) for size in (width, columns, columns))
    if compiled:
        panels, groups = [Panels.of(matrix, bias) for matrix in matrices], [CompiledAdapters([placed])]
        outputs, narrow = project(inputs, panels, groups, names)
        results = [*outputs]
        if gradients:
            results.append(project_back(grads, panels, groups, names, inputs, narrow))
    else:
        group, outputs = AdapterSlice(*placed), [inputs @ matrix.T + bias for matrix in matrices]
        own = group.forward(inputs, outputs, names)
        results = [*outputs]
        if gradients:
            left, right = (grad @ matrix for grad, matrix in zip(grads, matrices, strict=True))
            results.append(left + right)
            group.backward(results[-1], grads, names, inputs, own)
    buffers = [buffer for name in names for buffer in (sums[name].a, sums[name].b)] if gradients else []
    return [tensor.float() for tensor in (*results, *buffers)]
