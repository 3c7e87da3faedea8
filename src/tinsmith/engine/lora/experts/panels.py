"""The frozen matrices of experts, laid out for the compiled functions that multiply all experts in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from tinsmith.engine.lora.compiled_projections import AdapterTables, Panels, ProjectionCall, RowBlocks, fit, rows_of
from tinsmith.engine.lora.experts.pairs import Run


@dataclass(frozen=True, slots=True)
class ExpertPanels:
    """The matrices before and after the gate."""

    up: tuple[Panels, ...]
    """By site: gate and up, or up alone."""
    down: tuple[Panels]

    @classmethod
    def of(cls, up: Sequence[Tensor], down: Tensor, *, backward: bool = True) -> ExpertPanels | None:
        """Of weights [E, in, out] by site, as `Panels.of_experts`; None for widths that compiled functions do not
        multiply."""
        if not fit((*(size for weights in up for size in weights.shape[1:]), *down.shape[1:])):
            return None
        wide = tuple(Panels.of_experts(weights.mT, backward=backward) for weights in up)
        return cls(wide, (Panels.of_experts(down.mT, backward=backward),))


def fill_products(
    rows: Tensor,
    outputs: Sequence[Tensor],
    panels: Sequence[Panels],
    runs: Sequence[Run],
    tables: AdapterTables | None = None,
    narrow: Tensor | None = None,
) -> None:
    """Fill the outputs [P, out] of each site with the products of each row [P, in] with the matrix of its expert, whose
    rows are a run, and with what adapters add."""
    blocks = RowBlocks.of(runs, rows.shape[1], rows.dtype)
    ProjectionCall(rows_of(rows), outputs, panels, tables, blocks).fill_outputs(narrow)


def products_back(
    grads: Sequence[Tensor],
    panels: Sequence[Panels],
    runs: Sequence[Run],
    tables: AdapterTables | None = None,
    narrow_grads: Tensor | None = None,
) -> Tensor:
    """The gradient of the rows [P, in] of these products, from those of the outputs [P, out]."""
    result = grads[0].new_empty(len(grads[0]), panels[0].shape[1])
    blocks = RowBlocks.of(runs, sum(grad.shape[1] for grad in grads), result.dtype)
    call = ProjectionCall(result, [rows_of(grad) for grad in grads], panels, tables, blocks)
    call.fill_input_grads(narrow_grads, adds=False)
    return result
