"""How the rows of a job are cut where several micro-batches are computed at the same time. Arithmetic on lengths.

Rows of more than a micro-batch are cut into a share for each thread, and a share's rows into micro-batches of about the
same number of packed tokens, because a thread that is done waits for the others. A tree of rows that is computed in
pieces stays whole: with all cores for one piece it takes about as long, and half of the memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from tinsmith.engine.model.packing import LONG_ROW, MIN_SHARED, PackedRow
from tinsmith.engine.training.run_rows import RunRows
from tinsmith.engine.training.shares import RowCosts, balanced

MAX_SHARE = 0.65
"""Rows are cut if the largest share is at most this part of all: what shares have in common, each computes."""

MAX_EXCESS = 9 / 8
"""A micro-batch may have so many times the tokens of the setting, where one less is then enough."""


@dataclass(frozen=True, slots=True)
class ThreadShare:
    """Rows that are computed one micro-batch after the other."""

    rows: RunRows
    budgets: Mapping[bool, int]
    """Packed tokens of a micro-batch of the rows with a gradient, and of those without."""


def thread_shares(rows: RunRows, count: int, budget: int, *, cuts: bool = False) -> list[ThreadShare]:
    """Up to `count` shares of some rows, for micro-batches of about `budget` packed tokens. `cuts`: whether a larger
    tree of rows with a gradient is computed in pieces."""
    bounds = {with_grad: _bounds(some, count, budget, cuts=cuts and with_grad) for with_grad, some in rows.rows.items()}
    shares = []
    for index in range(count):
        own = {with_grad: some[slice(*bounds[with_grad][index : index + 2])] for with_grad, some in rows.rows.items()}
        if any(own.values()) or not index:
            budgets = {with_grad: _budget(some, budget) if count > 1 else budget for with_grad, some in own.items()}
            shares.append(ThreadShare(replace(rows, rows=own), budgets))
    return shares


def _bounds(rows: Sequence[PackedRow], count: int, budget: int, *, cuts: bool) -> list[int]:
    """Bounds [count + 1] of the shares; all rows are in the first if cutting gains nothing."""
    uncut = [0, *[len(rows)] * count]
    if count == 1 or _fits(rows, budget):
        return uncut
    costs = _costs(rows)
    if cuts and _largest_tree(costs, budget) > LONG_ROW * budget:
        return uncut
    total = costs.cost(0, len(rows))
    bounds = balanced(costs, count)
    return bounds if total > budget and _largest(costs, bounds) <= MAX_SHARE * total else uncut


def _budget(rows: Sequence[PackedRow], budget: int) -> int:
    """Packed tokens of the largest micro-batch, where all have about as many."""
    if _fits(rows, budget):
        return budget
    costs = _costs(rows)
    fewest = -(-costs.cost(0, len(rows)) // budget)
    if fewest == 1:  # rows of other runs fill what is left
        return budget
    for count in (fewest, fewest + 1):
        largest = _largest(costs, balanced(costs, count))
        if largest <= MAX_EXCESS * budget:
            return largest
    return budget


def _fits(rows: Sequence[PackedRow], budget: int) -> bool:
    """Whether the rows fit into a micro-batch even if they share nothing."""
    return sum(len(row.tokens) for row in rows) <= budget


def _largest_tree(costs: RowCosts, budget: int) -> int:
    """Packed tokens of the largest tree of several rows, which `packing.take_rows` keeps in one micro-batch."""
    starts = np.flatnonzero(costs.shared < MIN_SHARED * budget)
    trees = pairwise([*starts.tolist(), len(costs.shared)])
    return max((costs.cost(start, stop) for start, stop in trees if stop - start > 1), default=0)


def _costs(rows: Sequence[PackedRow]) -> RowCosts:
    return RowCosts.of([row.tokens for row in rows])


def _largest(costs: RowCosts, bounds: Sequence[int]) -> int:
    return max(costs.cost(start, stop) for start, stop in pairwise(bounds))
