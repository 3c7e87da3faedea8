"""The frozen matrices of experts, laid out for the compiled functions that multiply all experts in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from tinsmith.engine.lora.compiled_projections import Panels, ProjectionCall, RowBlocks, fit, rows_of
from tinsmith.engine.lora.experts.pairs import Run


@dataclass(frozen=True, slots=True)
class ExpertPanels:
    """The matrices before and after the gate."""

    up: Panels
    down: Panels

    @classmethod
    def of(cls, up_weights: Tensor, down_weights: Tensor) -> ExpertPanels | None:
        """Of bfloat16 weights [E, in, out]; None for widths that compiled functions do not multiply."""
        if not fit((*up_weights.shape[1:], *down_weights.shape[1:])):
            return None
        return cls(Panels.of_experts(up_weights.mT), Panels.of_experts(down_weights.mT))


def products(rows: Tensor, panels: Panels, runs: Sequence[Run]) -> Tensor:
    """The product of each row [P, in] with the matrix of its expert, whose rows are a run: [P, out]."""
    out, width = panels.shape
    output = rows.new_empty(len(rows), out)
    ProjectionCall(rows_of(rows), [output], [panels], None, RowBlocks.of(runs, width)).fill_outputs()
    return output


def products_back(grads: Tensor, panels: Panels, runs: Sequence[Run]) -> Tensor:
    """The gradient of the rows [P, in] of these products, from that of the products [P, out]."""
    out, width = panels.shape
    result = grads.new_empty(len(grads), width)
    call = ProjectionCall(result, [rows_of(grads)], [panels], None, RowBlocks.of(runs, out))
    call.fill_input_grads(adds=False)
    return result
