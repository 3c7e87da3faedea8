"""Packing as arithmetic: every row comes back whole, every shared prefix stands once, everyone sees their own past."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinsmith.engine.batch import Forest, Row, micro_batches, pack

# Few symbols, so that prefixes are shared, nested and equal all the time.
sequences = st.lists(st.integers(0, 2), min_size=1, max_size=14)
forests = st.lists(st.tuples(st.integers(0, 2), sequences), min_size=1, max_size=14)


def rows_of(drawn: list[tuple[int, list[int]]]) -> list[Row]:
    return [
        Row(key=key, adapter=adapter, tokens=np.array(tokens, dtype=np.int32))
        for key, (adapter, tokens) in enumerate(drawn)
    ]


def seen_by(forest: Forest) -> dict[int, set[int]]:
    """Packed position -> the packed positions it may look at, as the jobs say."""
    seen: dict[int, set[int]] = {}
    for job in forest.jobs:
        keys = [position for start, stop in (*job.prefix, (job.start, job.stop)) for position in range(start, stop)]
        for query in range(job.start, job.stop):
            if job.mask is None:
                allowed = [key for key in keys if key <= query]
                assert not job.prefix
            else:
                assert job.mask.shape == (job.stop - job.start, len(keys))
                allowed = [key for key, sees in zip(keys, job.mask[query - job.start], strict=True) if sees]
            assert query not in seen, "two jobs compute one position"
            seen[query] = set(allowed)
    return seen


@settings(max_examples=300, deadline=None)
@given(forests)
def test_every_row_comes_back_whole(drawn: list[tuple[int, list[int]]]) -> None:
    rows = rows_of(drawn)
    forest = pack(rows)
    for row in rows:
        np.testing.assert_array_equal(forest.tokens[forest.index[row.key]], row.tokens)
        np.testing.assert_array_equal(forest.positions[forest.index[row.key]], np.arange(len(row.tokens)))


@settings(max_examples=300, deadline=None)
@given(forests)
def test_every_position_sees_its_own_row_s_past_and_nothing_else(drawn: list[tuple[int, list[int]]]) -> None:
    rows = rows_of(drawn)
    forest = pack(rows)
    seen = seen_by(forest)
    assert sorted(seen) == list(range(len(forest.tokens)))
    for row in rows:
        path = forest.index[row.key].tolist()
        for depth, position in enumerate(path):
            assert seen[position] == set(path[: depth + 1])


@settings(max_examples=200, deadline=None)
@given(forests)
def test_a_shared_prefix_stands_once(drawn: list[tuple[int, list[int]]]) -> None:
    rows = rows_of(drawn)
    prefixes = {(row.adapter, tuple(row.tokens[: end + 1].tolist())) for row in rows for end in range(len(row.tokens))}
    assert len(pack(rows).tokens) == len(prefixes)


@settings(max_examples=200, deadline=None)
@given(forests)
def test_spans_give_every_position_to_its_row_s_adapter(drawn: list[tuple[int, list[int]]]) -> None:
    rows = rows_of(drawn)
    forest = pack(rows)
    owners = [span.adapter for span in forest.spans for _ in range(span.start, span.stop)]
    assert len(owners) == len(forest.tokens)
    for row in rows:
        assert {owners[position] for position in forest.index[row.key]} == {row.adapter}
    assert len({span.adapter for span in forest.spans}) == len(forest.spans)


@settings(max_examples=200, deadline=None)
@given(forests, st.integers(1, 40))
def test_micro_batches_hold_every_row_once_within_the_budget(drawn: list[tuple[int, list[int]]], budget: int) -> None:
    rows = rows_of(drawn)
    batches = list(micro_batches(rows, budget))
    assert sorted(row.key for batch in batches for row in batch) == list(range(len(rows)))
    for batch in batches:
        assert len(batch) == 1 or len(pack(batch).tokens) <= budget


@pytest.mark.parametrize("long", [95, 96, 97, 300])
def test_rows_longer_than_a_merged_job(long: int) -> None:
    draw = np.random.default_rng(long)
    row = draw.integers(0, 500, long).astype(np.int32)
    rows = [row, np.append(row, row[:50]), row[: long // 2], draw.integers(0, 500, 120).astype(np.int32)]
    forest = pack([Row(key=key, adapter=0, tokens=tokens.astype(np.int32)) for key, tokens in enumerate(rows)])
    seen = seen_by(forest)
    for key in range(len(rows)):
        path = forest.index[key].tolist()
        assert all(seen[position] == set(path[: depth + 1]) for depth, position in enumerate(path))
