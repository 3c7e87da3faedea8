"""Shares of rows: every row once, in order, and as even as rows allow; the order of the tree of sums."""

from __future__ import annotations

from itertools import combinations_with_replacement, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinsmith.engine.model import packing
from tinsmith.engine.training.shares import RowCosts, balanced, first_shard, halved, tree_order

ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=9)


def in_packing_order(rows: list[list[int]]) -> list[np.ndarray]:
    return [np.array(row, np.int32) for row in sorted(rows)]


def packed(rows: list[np.ndarray]) -> int:
    return packing.packed_tokens([packing.PackedRow(key=k, adapter=0, tokens=row) for k, row in enumerate(rows)])


@settings(max_examples=60, deadline=None)
@given(rows=ROWS, count=st.integers(1, 4))
def test_largest_share_is_the_smallest_possible(rows: list[list[int]], count: int):
    sorted_rows = in_packing_order(rows)
    bounds = balanced(RowCosts.of(sorted_rows), count)
    assert (bounds[0], bounds[-1], len(bounds)) == (0, len(rows), count + 1)
    assert bounds == sorted(bounds)

    def largest(cuts: tuple[int, ...]) -> int:
        ends = [0, *cuts, len(rows)]
        return max(packed(sorted_rows[start:stop]) for start, stop in pairwise(ends))

    every_way = combinations_with_replacement(range(len(rows) + 1), count - 1)
    assert largest(tuple(bounds[1:-1])) == min(map(largest, every_way))


@settings(max_examples=60, deadline=None)
@given(rows=ROWS, levels=st.integers(0, 3))
def test_halves_hold_every_row_once_and_nest(rows: list[list[int]], levels: int):
    sorted_rows = in_packing_order(rows)
    costs = RowCosts.of(sorted_rows)
    bounds = halved(costs, 2**levels)
    assert (bounds[0], bounds[-1], len(bounds)) == (0, len(rows), 2**levels + 1)
    assert bounds == sorted(bounds)
    assert bounds[:: 2 ** max(levels - 1, 0)] == halved(costs, min(2, 2**levels))
    if levels == 1:
        longest = max(map(len, rows), default=0)
        assert (
            max(packed(sorted_rows[: bounds[1]]), packed(sorted_rows[bounds[1] :])) <= packed(sorted_rows) / 2 + longest
        )


def test_halves_give_every_rank_rows_where_there_are_few():
    assert halved(RowCosts.of([np.full(5, row, np.int32) for row in range(4)]), 8) == [0, 1, 1, 2, 2, 3, 3, 4, 4]


@settings(max_examples=60, deadline=None)
@given(rows=ROWS)
def test_costs_are_those_of_the_packed_tree(rows: list[list[int]]):
    sorted_rows = in_packing_order(rows)
    costs = RowCosts.of(sorted_rows)
    for start in range(len(rows)):
        for stop in range(start, len(rows) + 1):
            assert costs.cost(start, stop) == packed(sorted_rows[start:stop])


def test_rows_of_different_models_share_nothing():
    row = np.arange(5, dtype=np.int32)
    assert RowCosts.of([row, row, row], first_rows=[0, 2]).ends.tolist() == [0, 5, 5, 10]


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_tree_gives_the_same_bits_for_every_number_of_ranks(ranks: int):
    draw = np.random.default_rng(0)
    shards = (draw.normal(size=(8, 40)) * 10.0 ** draw.integers(-6, 6, (8, 40))).astype(np.float32)

    def added(values: list[np.ndarray]) -> np.ndarray:
        values = [value.copy() for value in values]
        for left, right in tree_order(values):
            left += right
        return values[0]

    by_rank = [added(list(part)) for part in np.split(shards, ranks)]
    np.testing.assert_array_equal(added(by_rank), added(list(shards)))
    assert not np.array_equal(added(list(shards)), shards.sum(0, dtype=np.float32))  # the order matters here


def test_models_of_one_row_go_to_all_shards():
    assert {first_shard(f"model-{number}", 4) for number in range(40)} == {0, 1, 2, 3}
