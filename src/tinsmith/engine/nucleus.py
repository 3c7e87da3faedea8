"""What top_k and top_p leave of a row of chances, found without ordering the row.

A row has a chance for each of 50,000 tokens or more, and most rows' nucleus is far shorter. What matters is where it
ends: the least chance that is kept. So only a row's greatest chances are put in order, and all of them only where these
were too few. Among tokens of one chance the lower id comes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

FIRST = 4096
"""So many of a row's greatest chances are looked at before all are."""


@dataclass(frozen=True, slots=True)
class Rule:
    """How one row is drawn."""

    temperature: float
    top_k: int
    top_p: float
    tops: int = 0
    """How many of the likeliest tokens are wanted beside the drawn one."""

    @property
    def narrowed(self) -> bool:
        """Whether fewer than all tokens may be drawn."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1)


def narrowed(chances: Tensor, rules: Sequence[Rule]) -> Tensor:
    """Chances float32 [R, V], with 0 for all but a row's top_k, and of these all but the fewest that together have
    top_p of their mass."""
    least, count = _ends(chances, rules, min(FIRST, chances.shape[1]))
    kept = chances >= least[:, None]
    too_many = kept.sum(dim=1) - count
    for row in too_many.nonzero()[:, 0].tolist():
        last = (chances[row] == least[row]).nonzero()[:, 0]
        kept[row, last[-int(too_many[row]) :]] = False
    return chances * kept


def _ends(chances: Tensor, rules: Sequence[Rule], size: int) -> tuple[Tensor, Tensor]:
    """The least chance that each row keeps float32 [R], and of how many tokens int64 [R]."""
    vocabulary, device = chances.shape[1], chances.device
    most = [min(rule.top_k, vocabulary) if rule.top_k > 0 else vocabulary for rule in rules]
    top_k = torch.tensor(most, device=device)[:, None]
    top_p = torch.tensor([rule.top_p for rule in rules], dtype=torch.float64, device=device)[:, None]
    values = _greatest(chances, size)
    among = values.double() * (torch.arange(size, device=device) < top_k)
    mass = among.cumsum(dim=1)
    whole = torch.where(top_k <= size, mass[:, -1:], chances.sum(dim=1, keepdim=True, dtype=torch.float64))
    count = ((mass - among) < top_p * whole).sum(dim=1).clamp(min=1)
    least = values.gather(1, count[:, None] - 1)[:, 0]
    unsure = (count == size) | ((top_k > size) & (top_k < vocabulary))[:, 0]
    if size < vocabulary and bool(unsure.any()):
        again = unsure.nonzero()[:, 0]
        least[again], count[again] = _ends(chances[again], [rules[row] for row in again.tolist()], vocabulary)
    return least, count


def _greatest(chances: Tensor, size: int) -> Tensor:
    """The `size` greatest of each row in order. On a CPU by NumPy, whose vector code is ten times as fast."""
    if chances.device.type != "cpu":
        return chances.topk(size, dim=1).values
    values = chances.numpy()
    if size < values.shape[1]:
        values = np.partition(values, -size, axis=1)[:, -size:]
    return torch.from_numpy(np.sort(values, axis=1)[:, ::-1].copy())
