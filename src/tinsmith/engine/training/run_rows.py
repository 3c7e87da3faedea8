"""The rows of a training run, or a share of them, and the scores that were computed for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tinsmith import routed_experts
from tinsmith.engine.base import Datum, Pass
from tinsmith.engine.model import packing
from tinsmith.engine.training import loss_specs
from tinsmith.routed_experts import RouterShape


@dataclass(frozen=True, slots=True)
class RunItem:
    """One datum of a run: its pass and its place in the pass."""

    pass_index: int
    datum_index: int
    datum: Datum
    grad_mask: np.ndarray
    """bool [N]: positions that may have a gradient."""
    recorded: np.ndarray | None = None
    """The record [N, layers, k] of the experts that the sampler routed the tokens to."""
    replays: bool = False
    """Whether the pass takes the recorded experts; else it only compares them with its own."""

    @property
    def replayed(self) -> np.ndarray | None:
        return self.recorded if self.replays else None

    @property
    def has_grad(self) -> bool:
        """Whether any position may have a gradient; a datum without runs without an autograd graph."""
        return bool(self.grad_mask.any())

    @property
    def targets_per_position(self) -> int:
        return self.datum.targets.size // len(self.datum.tokens)


def _item(pass_index: int, datum_index: int, request: Pass, router: RouterShape | None) -> RunItem:
    datum = request.data[datum_index]
    grad_mask = loss_specs.grad_mask(request, datum)
    if datum.routed_experts is None or router is None:
        return RunItem(pass_index, datum_index, datum, grad_mask)
    recorded = routed_experts.from_words(datum.routed_experts, router)
    replays = bool(request.loss_config.get(loss_specs.ROUTER_REPLAY, 1))
    return RunItem(pass_index, datum_index, datum, grad_mask, recorded, replays)


@dataclass(frozen=True, slots=True)
class RunRows:
    """The data of passes, and rows of them to compute: those with a gradient, and those without.

    A row's key is its index among the data. Rows are sorted for packing; those that replay other experts share no
    positions.
    """

    items: Sequence[RunItem]
    rows: Mapping[bool, Sequence[packing.PackedRow]]

    @classmethod
    def of(cls, passes: Sequence[Pass], router: RouterShape | None = None, original_context: int = 0) -> RunRows:
        """All rows of the passes; `router` and `original_context` are those of the base's card."""
        items = [
            _item(pass_index, datum_index, request, router)
            for pass_index, request in enumerate(passes)
            for datum_index in range(len(request.data))
        ]
        rows: dict[bool, list[packing.PackedRow]] = {True: [], False: []}
        for key, item in enumerate(items):
            marks = None if item.replayed is None else routed_experts.marks(item.replayed)
            tokens, images = item.datum.tokens, item.datum.images
            row = packing.PackedRow(
                key=key,
                adapter=0,
                tokens=tokens,
                images=images,
                marks=marks,
                long_factors=0 < original_context < len(tokens),
            )
            rows[item.has_grad].append(row)
        return cls(items, {with_grad: packing.sorted_for_packing(some) for with_grad, some in rows.items()})

    @property
    def keys(self) -> list[int]:
        """Keys of the rows: first of those with a gradient."""
        return [row.key for with_grad in (True, False) for row in self.rows[with_grad]]


@dataclass(frozen=True, slots=True)
class RunScores:
    """What a run has computed of its rows, for the rank that answers."""

    keys: np.ndarray
    """int64: keys of the rows."""
    logprobs: np.ndarray
    """float32: those of the rows' targets, row after row."""
    entropies: np.ndarray
    """float32: those of the rows' positions, row after row, where a pass needs them."""
    metrics: Sequence[Mapping[str, float]]
    """Sums over the rows by pass."""
