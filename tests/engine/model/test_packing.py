"""Packing rows into a tree of shared prefixes: each row attends to its own past only."""

from collections import deque
from itertools import pairwise, takewhile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinsmith.engine.model.packing import (
    MAX_MERGED_QUERIES,
    AttentionJob,
    PackedRow,
    PackedTree,
    pack,
    packed_tokens,
    sorted_for_packing,
    take_rows,
)


def rows_of(*tokens: list[int], adapters: list[int] | None = None) -> list[PackedRow]:
    return [
        PackedRow(key=key, adapter=adapters[key] if adapters else 0, tokens=np.array(row, np.int32))
        for key, row in enumerate(tokens)
    ]


some_rows = st.lists(
    st.tuples(st.integers(0, 2), st.lists(st.integers(0, 2), min_size=1, max_size=130)), min_size=1, max_size=12
)


def seen_by(tree: PackedTree) -> dict[int, set[int]]:
    """Packed position -> the packed positions that its query sees, by the jobs."""
    seen: dict[int, set[int]] = {}
    for job in tree.jobs:
        keys = [position for start, stop in job.prefix for position in range(start, stop)]
        keys += range(job.start, job.stop)
        mask = np.tri(job.stop - job.start, dtype=bool) if job.mask is None else job.mask
        assert mask.shape == (job.stop - job.start, len(keys))
        for query in range(job.stop - job.start):
            seen[job.start + query] = {keys[column] for column in np.flatnonzero(mask[query])}
    return seen


@settings(max_examples=150, deadline=None)
@given(some_rows)
def test_every_position_sees_exactly_its_own_past(data: list[tuple[int, list[int]]]) -> None:
    rows = rows_of(*(tokens for _, tokens in data), adapters=[adapter for adapter, _ in data])
    tree = pack(rows)
    seen = seen_by(tree)
    for row in rows:
        index = tree.index[row.key]
        assert tree.tokens[index].tolist() == row.tokens.tolist()
        assert tree.positions[index].tolist() == list(range(len(index)))
        for position, packed in enumerate(index):
            assert seen[packed] == set(index[: position + 1].tolist())


@settings(max_examples=100, deadline=None)
@given(some_rows)
def test_shared_prefixes_are_packed_once_per_adapter(data: list[tuple[int, list[int]]]) -> None:
    rows = rows_of(*(tokens for _, tokens in data), adapters=[adapter for adapter, _ in data])
    tree = pack(rows)
    prefixes = {(row.adapter, tuple(row.tokens[: end + 1])) for row in rows for end in range(len(row.tokens))}
    assert len(tree.tokens) == len(prefixes)
    for row in rows:
        (span,) = [span for span in tree.spans if span.adapter == row.adapter]
        assert all(span.start <= packed < span.stop for packed in tree.index[row.key])


def test_shared_prompt_of_a_group_is_packed_once() -> None:
    prompt = list(range(100))
    tree = pack(rows_of(*([*prompt, 200 + answer, 300] for answer in range(8))))
    assert len(tree.tokens) == 100 + 8 * 2


def test_row_for_each_turn_gives_the_jobs_of_whole_rows() -> None:
    whole = [list(range(300)), [*range(100), *range(500, 700)]]
    turns = [row[:stop] for row in whole for stop in range(50, 301, 50)]
    by_turn, by_leaf = (pack(rows_of(*rows)).jobs for rows in (turns, whole))
    assert [(job.start, job.stop, job.prefix) for job in by_turn] == [(0, 300, ()), (300, 500, ((0, 100),))]
    for left, right in zip(by_turn, by_leaf, strict=True):
        np.testing.assert_array_equal(left.mask, right.mask)


def test_short_chunks_are_merged_into_one_job() -> None:
    short = pack(rows_of(*([1, 2, 3, 10 + number] for number in range(20))))
    long = pack(rows_of(*([number] * MAX_MERGED_QUERIES for number in range(4))))
    assert len(short.jobs) == 1
    assert [job.mask for job in long.jobs] == [None] * 4
    assert long.jobs[1] == AttentionJob(start=MAX_MERGED_QUERIES, stop=2 * MAX_MERGED_QUERIES, prefix=(), mask=None)


def micro_batches(rows: list[PackedRow], budget: int) -> list[list[PackedRow]]:
    waiting, batches = deque(sorted_for_packing(rows)), []
    while waiting:
        batches.append(take_rows(waiting, budget)[0])
    return batches


@settings(max_examples=60, deadline=None)
@given(some_rows, st.integers(1, 200))
def test_micro_batches_keep_every_row_and_the_budget(data: list[tuple[int, list[int]]], budget: int) -> None:
    rows = rows_of(*(tokens for _, tokens in data), adapters=[adapter for adapter, _ in data])
    batches = micro_batches(rows, budget)
    assert sorted(row.key for batch in batches for row in batch) == [row.key for row in rows]
    for batch in batches:
        shared = [common(left, right) for left, right in pairwise(sorted_for_packing(batch))]
        assert len(batch) == 1 or len(pack(batch).tokens) <= budget + shared[-1]


def common(left: PackedRow, right: PackedRow) -> int:
    same = takewhile(lambda pair: pair[0] == pair[1], zip(left.tokens, right.tokens, strict=False))
    return len(list(same)) if left.adapter == right.adapter else 0


@pytest.mark.parametrize("prompt", [0, 10, 40, 400])
def test_prompt_longer_than_budget_is_shared(prompt: int) -> None:
    """A shared prompt does not count against the budget again for each row."""
    rows = rows_of(*([0] * prompt + [1 + number] * 5 for number in range(9)))
    assert [len(batch) for batch in micro_batches(rows, 20)] == [4, 4, 1]


def test_group_is_not_split_where_it_fits_the_next_micro_batch() -> None:
    """Three of four answers of the second group would fit, and their prompt would be computed twice."""
    groups = [[100 * group] * 100 + [100 * group + answer] * 50 for group in (1, 2) for answer in (1, 2, 3, 4)]
    batches = micro_batches(rows_of(*groups), 450)
    assert [len(batch) for batch in batches] == [4, 4]
    assert sum(len(pack(batch).tokens) for batch in batches) == packed_tokens(rows_of(*groups))


@settings(max_examples=60, deadline=None)
@given(some_rows, st.integers(1, 200), st.integers(0, 200))
def test_taken_rows_count_as_packed(data: list[tuple[int, list[int]]], budget: int, used: int) -> None:
    waiting = deque(sorted_for_packing(rows_of(*(tokens for _, tokens in data), adapters=[n for n, _ in data])))
    before = list(waiting)
    taken, total = take_rows(waiting, budget, used)
    assert taken + list(waiting) == before
    assert total - used == (len(pack(taken).tokens) if taken else 0)
    assert taken or used, "an empty micro-batch takes a row of any length"
