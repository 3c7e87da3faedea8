"""Rows of tokens -> one packed forest in which every shared prefix stands once, and back.

Rows of one adapter are sorted, so a row's longest common prefix with any earlier row is its prefix with the row
just before it. Only what is new is appended to the packed tokens; `index` says where each of a row's positions
stands. So a prompt shared by a group, a conversation that grows turn by turn and identical answers are computed once,
forward and backward, with no padding. Rows of different adapters never share: their hidden states differ.

Example: rows [7 8 9], [7 8 5 6] of one adapter pack to tokens [7 8 5 6 9] with index [0 1 4] and [0 1 2 3].

Left out: tensors. Everything here is numpy, made once for a pass and used by every layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

MERGED_QUERIES = 96
"""Neighbouring short chunks join one attention job up to so many queries: a call costs as much as about 3 MFLOP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One sequence to compute. `adapter` orders and separates rows; `key` gives the row back to its owner."""

    key: int
    adapter: int
    tokens: np.ndarray
    """int32 [N]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Packed positions start..stop belong to one adapter."""

    adapter: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One attention call: the queries start..stop look at `prefix` (runs of packed positions, in order of depth) and at
    themselves. `mask` None means causal without prefix; else True where query [Q] may see key [P + Q]."""

    start: int
    stop: int
    prefix: tuple[tuple[int, int], ...]
    mask: np.ndarray | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Forest:
    """The packed tokens [T], each one's position in its row, and where the rows' positions stand."""

    tokens: np.ndarray
    """int32 [T]."""
    positions: np.ndarray
    """int64 [T]."""
    index: dict[int, np.ndarray]
    """Row key -> int64 [N]."""
    spans: tuple[Span, ...]
    jobs: tuple[Job, ...]


@dataclass(frozen=True, slots=True)
class _Chunk:
    """What one row added: packed start..stop, after `depth` positions found in `path` (packed ids of its prefix)."""

    start: int
    stop: int
    path: np.ndarray

    @property
    def depth(self) -> int:
        return len(self.path)


def in_packing_order(rows: Iterable[Row]) -> list[Row]:
    """By adapter, then by tokens: neighbours share the longest prefixes."""
    return sorted(rows, key=lambda row: (row.adapter, row.tokens.astype(">i4").tobytes()))


def micro_batches(rows: Sequence[Row], budget: int) -> Iterator[list[Row]]:
    """Rows in packing order, cut where their packed tokens would pass `budget`; a longer row goes alone.

    A row may pass it by what it shares with the row before: after a cut that would have to be computed again. So a
    prompt that is longer than the budget is shared too.
    """
    batch: list[Row] = []
    used = 0
    for row in in_packing_order(rows):
        shared = _shared(batch[-1], row) if batch else 0
        if batch and used + len(row.tokens) - shared > budget + shared:
            yield batch
            batch, used, shared = [], 0, 0
        batch.append(row)
        used += len(row.tokens) - shared
    if batch:
        yield batch


def pack(rows: Sequence[Row]) -> Forest:
    """The forest of these rows; `rows` may come in any order."""
    index: dict[int, np.ndarray] = {}
    chunks: list[_Chunk] = []
    spans: list[Span] = []
    total = 0
    previous: Row | None = None
    for row in in_packing_order(rows):
        path = index[previous.key][: _shared(previous, row)] if previous is not None else np.empty(0, np.int64)
        start, total = total, total + len(row.tokens) - len(path)
        if total > start:
            chunks.append(_Chunk(start, total, path))
        index[row.key] = np.concatenate([path, np.arange(start, total)])
        if spans and spans[-1].adapter == row.adapter:
            spans[-1] = Span(adapter=row.adapter, start=spans[-1].start, stop=total)
        else:
            spans.append(Span(adapter=row.adapter, start=start, stop=total))
        previous = row
    tokens, positions = np.empty(total, np.int32), np.empty(total, np.int64)
    for row in rows:
        tokens[index[row.key]] = row.tokens
        positions[index[row.key]] = np.arange(len(row.tokens))
    return Forest(tokens=tokens, positions=positions, index=index, spans=tuple(spans), jobs=tuple(_jobs(chunks)))


def _shared(left: Row, right: Row) -> int:
    """Length of the common prefix; 0 across adapters."""
    if left.adapter != right.adapter:
        return 0
    length = min(len(left.tokens), len(right.tokens))
    differs = np.flatnonzero(left.tokens[:length] != right.tokens[:length])
    return int(differs[0]) if differs.size else length


def _jobs(chunks: Sequence[_Chunk]) -> Iterator[Job]:
    joined: list[_Chunk] = []
    for chunk in chunks:
        if joined and chunk.stop - joined[0].start > MERGED_QUERIES:
            yield _job(joined)
            joined = []
        joined.append(chunk)
    if joined:
        yield _job(joined)


def _job(chunks: Sequence[_Chunk]) -> Job:
    """The first chunk's prefix holds every prefix position that the later ones need: they branch off its path."""
    first, stop = chunks[0], chunks[-1].stop
    prefix = runs(first.path)
    if len(chunks) == 1 and not first.depth:
        return Job(start=first.start, stop=stop, prefix=prefix, mask=None)
    mask = np.zeros((stop - first.start, first.depth + stop - first.start), bool)
    for chunk in chunks:
        queries = slice(chunk.start - first.start, chunk.stop - first.start)
        own = first.depth + queries.start
        # A path position is a key of this job itself, or stands in the shared prefix at the column of its depth.
        inside = chunk.path >= first.start
        columns = np.where(inside, chunk.path - first.start + first.depth, np.arange(chunk.depth))
        mask[queries, columns] = True
        mask[queries, own : own + chunk.stop - chunk.start] = np.tri(chunk.stop - chunk.start, dtype=bool)
    return Job(start=first.start, stop=stop, prefix=prefix, mask=mask)


def runs(path: np.ndarray) -> tuple[tuple[int, int], ...]:
    """Packed ids as contiguous runs: [0 1 2 7 8] -> ((0, 3), (7, 9))."""
    if not path.size:
        return ()
    cuts = np.flatnonzero(np.diff(path) != 1) + 1
    return tuple((int(run[0]), int(run[-1]) + 1) for run in np.split(path, cuts))
