"""How the rows of a job are cut where several micro-batches are computed at the same time. Arithmetic on lengths.

Rows of more than a micro-batch are cut into micro-batches, of which each thread gets a share. In a round each thread
computes one, and waits for the others; so the largest micro-batches are computed together, then the next ones, and
whether groups of rows stay whole or all micro-batches get about the same number of packed tokens is decided by the sum
of the rounds' largest. A tree of rows that is computed in pieces stays whole: with all cores for one piece it takes
about as long, and half of the memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from tinsmith.engine.model.packing import LONG_ROW, MICRO_BATCH_COST, MIN_SHARED, PackedRow, take_rows
from tinsmith.engine.training.run_rows import RunRows
from tinsmith.engine.training.shares import RowCosts, balanced

MAX_SHARE = 0.65
"""Rows are cut if the rounds' largest micro-batches have at most this part of the packed tokens that are computed
without a cut, on all cores one micro-batch after the other."""

MAX_EXCESS = 9 / 8
"""A micro-batch of up to this many times `budget` tokens is not computed in pieces."""

PIECES_COST = 4 / 3
"""Time of a micro-batch in two pieces, relative to that of a whole one."""


@dataclass(frozen=True, slots=True)
class ThreadShare:
    """Rows that are computed one micro-batch after the other."""

    rows: RunRows
    budgets: Mapping[bool, int]
    """Packed tokens of a micro-batch of the rows with a gradient, and of those without."""
    sizes: Mapping[bool, Sequence[int]]
    """Rows of each micro-batch of these. Empty if other runs may have rows in them."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """Micro-batches of neighbouring rows, largest first. A round is `count` of them, one for each thread."""

    budget: int
    """Packed tokens of the largest that is not computed in pieces."""
    bounds: Sequence[tuple[int, int]]
    """The first row of each, and the one after its last."""
    sizes: Sequence[int]
    """Packed tokens of each."""

    def largest(self, count: int) -> Sequence[int]:
        """Packed tokens of the largest micro-batch of each round."""
        return self.sizes[::count]

    def time(self, count: int) -> float:
        """Estimated time of all rounds, in units of a packed token's."""
        return sum(size * (PIECES_COST if size > self.budget else 1) + MICRO_BATCH_COST for size in self.largest(count))


def thread_shares(rows: RunRows, count: int, budget: int, *, cuts: bool = False) -> list[ThreadShare]:
    """Up to `count` shares of some rows, for micro-batches of about `budget` packed tokens. `cuts`: whether a larger
    tree of rows with a gradient is computed in pieces."""
    plans = {with_grad: _plan(some, count, budget, cuts=cuts and with_grad) for with_grad, some in rows.rows.items()}
    shares = []
    for index in range(count):
        own, sizes, budgets = dict[bool, Sequence[PackedRow]](), dict[bool, Sequence[int]](), dict[bool, int]()
        for with_grad, some in rows.rows.items():
            plan = plans[with_grad]
            if plan is None:
                own[with_grad], budgets[with_grad] = [] if index else some, budget
                continue
            bounds = plan.bounds[index::count]
            own[with_grad] = [row for start, stop in bounds for row in some[start:stop]]
            sizes[with_grad] = [stop - start for start, stop in bounds]
            budgets[with_grad] = plan.budget
        if any(own.values()) or not index:
            shares.append(ThreadShare(replace(rows, rows=own), budgets, sizes))
    return shares


def _plan(rows: Sequence[PackedRow], count: int, budget: int, *, cuts: bool) -> _Plan | None:
    """The micro-batches whose rounds take least; None if all rows stay in one share, because cutting gains nothing."""
    if count == 1 or _fits(rows, budget):
        return None
    costs = _costs(rows)
    if costs.cost(0, len(rows)) <= budget or (cuts and _largest_tree(costs, budget) > LONG_ROW * budget):
        return None
    plans = [*_plans(rows, costs, count, budget, cuts=cuts)]
    best = min(plans, key=lambda plan: plan.time(count))
    return best if sum(best.largest(count)) <= MAX_SHARE * sum(plans[0].sizes) else None


def _plans(rows: Sequence[PackedRow], costs: RowCosts, count: int, budget: int, *, cuts: bool) -> Iterator[_Plan]:
    """Micro-batches of whole groups where these fit, and of about the same number of tokens, as many in each share."""
    left, bounds = deque(rows), [0]
    while left:
        taken, _ = take_rows(left, budget, whole_trees=cuts)
        bounds.append(bounds[-1] + len(taken))
    yield _plan_of(costs, bounds, budget)
    fewest = -(-costs.cost(0, len(rows)) // (budget * count))
    for rounds in (fewest, fewest + 1):
        equal = _plan_of(costs, balanced(costs, rounds * count), budget)
        if equal.sizes[0] <= equal.budget:
            yield equal


def _plan_of(costs: RowCosts, bounds: Sequence[int], budget: int) -> _Plan:
    parts = [(start, stop) for start, stop in pairwise(bounds) if start < stop]
    parts.sort(key=lambda part: -costs.cost(*part))
    sizes = [costs.cost(*part) for part in parts]
    return _Plan(max([budget, *(size for size in sizes if size <= MAX_EXCESS * budget)]), parts, sizes)


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
