"""Cuts the rows of a pass into shares for the ranks of a group. Arithmetic on lengths; no torch.

Rows come in packing order, so a cut costs only the prefix that the rows on both sides of it share, which both shares
compute. A share is neighbouring rows; a row is never cut. The cost of a share is its packed tokens.

`balanced` cuts as many shares as there are ranks, with the smallest possible cost of the largest. `halved` cuts a power
of two of them by halves of halves, so that the first half of 8 shares is the first of 2: the shares of deterministic
mode, which do not depend on the number of ranks.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class RowCosts:
    """Packed tokens of neighbouring rows."""

    ends: np.ndarray
    """int64 [R + 1]: packed tokens of the first rows; position 0 is 0."""
    shared: np.ndarray
    """int64 [R]: length of the prefix that a row shares with the row before."""

    @classmethod
    def of(cls, rows: Sequence[np.ndarray], first_rows: Sequence[int] = (0,)) -> RowCosts:
        """Costs of rows of tokens [N] in packing order; the rows numbered `first_rows` share nothing with those
        before."""
        shared = np.zeros(len(rows), np.int64)
        apart = {0, *first_rows}
        for index in range(1, len(rows)):
            if index not in apart:
                shared[index] = _common_prefix(rows[index - 1], rows[index])
        new = np.array([len(row) for row in rows], np.int64) - shared
        return cls(np.concatenate([[0], np.cumsum(new)]).astype(np.int64), shared)

    def cost(self, start: int, stop: int) -> int:
        """Packed tokens of the rows start..stop by themselves."""
        return int(self.ends[stop] - self.ends[start] + self.shared[start]) if stop > start else 0

    def longest(self, start: int, limit: int) -> int:
        """The end of the longest share from `start` that costs at most `limit`."""
        if start == len(self.shared):
            return start
        allowed = limit + self.ends[start] - self.shared[start]
        return int(np.searchsorted(self.ends, allowed, side="right")) - 1


def balanced(costs: RowCosts, count: int) -> list[int]:
    """Bounds [count + 1] of shares; the cost of the largest is the smallest possible.

    A share from a later row to the same end costs no more, so taking as many rows as a limit allows is optimal.
    """
    rows = len(costs.shared)
    if not rows:
        return [0] * (count + 1)
    total = int(costs.ends[-1])
    lengths = np.diff(costs.ends) + costs.shared
    low, high = max(int(lengths.max()), -(-total // count)), total
    while low < high:
        limit = (low + high) // 2
        low, high = (low, limit) if _bounds(costs, count, limit)[-1] == rows else (limit + 1, high)
    return _bounds(costs, count, low)


def halved(costs: RowCosts, count: int) -> list[int]:
    """Bounds [count + 1] of shares, `count` a power of two: the best halves, and their best halves."""
    bounds = [0, len(costs.shared)]
    while len(bounds) <= count:
        halves = [_middle(costs, start, stop) for start, stop in pairwise(bounds)]
        bounds = [bound for pair in zip(bounds, [*halves, 0], strict=True) for bound in pair][:-1]
    return bounds


def first_shard(model_id: str, shards: int) -> int:
    """The shard that takes a model's first share. Requests of few rows would otherwise all go to the first rank."""
    return zlib.crc32(model_id.encode()) % shards


def tree_order(values: Sequence[_Value]) -> list[tuple[_Value, _Value]]:
    """The additions left += right of a fixed binary tree over a power of two of values; the sum is in the first.

    Neighbours are added first, so the sum is the same if each of 1, 2, 4, … ranks adds its neighbouring values before.
    """
    additions, level = [], list(values)
    while len(level) > 1:
        additions += list(zip(level[::2], level[1::2], strict=True))
        level = level[::2]
    return additions


def _bounds(costs: RowCosts, count: int, limit: int) -> list[int]:
    bounds = [0]
    for _ in range(count):
        bounds.append(costs.longest(bounds[-1], limit))
    return bounds


def _middle(costs: RowCosts, start: int, stop: int) -> int:
    """The bound between two halves of the rows start..stop, the larger of which costs least."""
    if stop - start < 2:
        return stop
    cuts = np.arange(start + 1, stop)
    left = costs.ends[cuts] - costs.ends[start] + costs.shared[start]
    right = costs.ends[stop] - costs.ends[cuts] + costs.shared[cuts]
    return int(cuts[np.argmin(np.maximum(left, right))])


def _common_prefix(left: np.ndarray, right: np.ndarray) -> int:
    length = min(len(left), len(right))
    differs = np.flatnonzero(left[:length] != right[:length])
    return int(differs[0]) if differs.size else length
