"""The experts of one layer, as transformers stores them."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from tinsmith.engine.cpu.instructions import panel_kind
from tinsmith.engine.lora.adapter import PlacedAdapter
from tinsmith.engine.lora.experts.panels import ExpertPanels


class Placement(Protocol):
    """The adapters of the current pass, in the order of their positions."""

    @property
    def placed(self) -> tuple[PlacedAdapter, ...]:
        """Adapters and their positions."""
        ...


class ExpertStack:
    """The experts of one layer: their weights as transformers stores them, and the names of their adapters' sites.

    Reads the module's parameters at each use, because the check at load replaces them for a while.
    """

    def __init__(self, module: Any, name: str, active: Placement) -> None:
        self.module, self.name, self.active = module, name, active
        self.gated, self.biased = bool(module.has_gate), bool(module.has_bias)
        self.transposed, self.concatenated = bool(module.is_transposed), bool(module.is_concatenated)
        up = self._up
        self.count = len(up)
        self.hidden, wide = (up.shape[1:] if self.transposed else reversed(up.shape[1:])) if up.ndim == 3 else (0, 0)
        self.width = wide // 2 if self.gated else wide
        self.panels: ExpertPanels | None = None
        """The matrices as compiled functions read them, in place of the module's own."""

    def lay_out(self, *, backward: bool = True) -> None:
        """Lay the matrices out for compiled functions, if these multiply experts of this dtype and such widths, without
        biases; for gradients of inputs too, if `backward`."""
        if self.biased or self._up.ndim != 3 or panel_kind(self._up.device, self._up.dtype) is None:
            return
        self.panels = ExpertPanels.of(self.up_views(self.up_weights), self.down_weights, backward=backward)
        if self.panels is not None:
            for parameter in (self._up, self.module.down_proj):  # keep their shapes alone
                parameter.data = torch.full((1,), torch.nan, dtype=parameter.dtype, device=parameter.device).expand(
                    parameter.shape
                )

    @property
    def weight_count(self) -> int:
        """Number of frozen weights of all experts."""
        return int(self._up.numel() + self.module.down_proj.numel())

    @property
    def up_names(self) -> tuple[str, ...]:
        """Sites of the products before the gate: gate and up, or up alone."""
        return (f"{self.name}.w1", f"{self.name}.w3") if self.gated else (f"{self.name}.w1",)

    @property
    def down_name(self) -> str:
        return f"{self.name}.w2"

    @property
    def up_weights(self) -> Tensor:
        """[E, in, out] of the products before the gate."""
        return self._up if self.transposed else self._up.mT

    @property
    def down_weights(self) -> Tensor:
        """[E, in, out] of the products after the gate."""
        return self.module.down_proj if self.transposed else self.module.down_proj.mT

    @property
    def up_bias(self) -> Tensor | None:
        """[E, out]."""
        if not self.biased:
            return None
        return self.module.gate_up_proj_bias if self.gated else self.module.up_proj_bias

    @property
    def down_bias(self) -> Tensor | None:
        return self.module.down_proj_bias if self.biased else None

    def up_views(self, wide: Tensor) -> tuple[Tensor, ...]:
        """Views of the product before the gate [P, out] by site, in the order of `up_names`."""
        if not self.gated:
            return (wide,)
        return wide.chunk(2, dim=-1) if self.concatenated else (wide[..., ::2], wide[..., 1::2])

    def activate(self, wide: Tensor) -> Tensor:
        """The model's own gate or activation: [P, out] -> [P, width]."""
        return self.module._apply_gate(wide) if self.gated else self.module.act_fn(wide)

    @property
    def _up(self) -> Tensor:
        return self.module.gate_up_proj if self.gated else self.module.up_proj


def stack_of(module: Any) -> ExpertStack:
    """The stack of an experts module on which `install` has run."""
    return module.stack  # type: ignore[no-any-return]
