"""Packs rows of tokens into one tree that holds every shared prefix once.

Rows of one adapter are sorted, so that a row's longest common prefix with any earlier row is its common prefix with the
previous row. Only the new tokens are appended to the packed tokens; `index` maps each position of a row to its packed
position. A prompt shared by a group, a conversation that grows turn by turn and identical replies are thus computed
once, forward and backward, without padding. Rows of different adapters share nothing: their hidden states differ.

Example: rows [7 8 9] and [7 8 5 6] of one adapter pack to tokens [7 8 5 6 9] with index [0 1 4] and [0 1 2 3].

Rows share an image only if it is the same: rows are compared by `images.rows.content_ids`. A row with the long factors
of `longrope` shares positions only with others that have them.

A tree that is larger than a micro-batch is cut into pieces, which are computed one at a time (`cut`). Its positions are
in depth-first order, so a piece start..stop sees of earlier positions only the path to its first one, the ancestors of
the cut, and of these only keys and values. Pieces are computed from the last to the first, each forward and backward:
when it is its turn, the gradients of its keys and values from all later pieces are known. Before it, the part of its
path that the last computed piece did not share is computed forward, and its keys and values are saved. The result is
that of one pass over the tree, to rounding. Activations take the memory of one piece, saved keys and values that of one
path, and only ancestors of cuts are computed forward twice. AReaL-DTA (arXiv 2602.00482) goes through a tree of
rollouts in this order too.

Everything here is numpy, computed once for a pass and used by every layer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from tinsmith.engine.base import InputImage
from tinsmith.engine.images.rows import ImageTokens, content_ids, rotary_positions

MAX_MERGED_QUERIES = 96
"""Short neighbouring chunks are merged into one attention job of up to this many queries, because a call costs as much
as about 3 MFLOP."""

MICRO_BATCH_COST = 64
"""Packed tokens that one more micro-batch or piece is worth, where it is weighed against a prefix that is computed
again."""

MIN_SHARED = 1 / 16
"""Prefix, as a part of a micro-batch, for which rows stay in one tree that is cut into pieces."""

LONG_ROW = 2
"""A row of up to this many micro-batches' tokens is not cut, because half of it would be computed forward twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRow:
    """A sequence to compute. Rows of different `adapter` numbers share nothing; `key` identifies the row in the
    result.
    """

    key: int
    adapter: int
    tokens: np.ndarray
    """int32 [N]."""
    images: tuple[InputImage, ...] = ()
    marks: np.ndarray | None = None
    """uint64 [N]: rows share a position only if their marks there are equal too. None: 0 everywhere."""
    long_factors: bool = False
    """Whether the row is longer than the base model's `original_context`."""

    @property
    def ids(self) -> np.ndarray:
        """Integers [N] that are equal for equal content: the tokens themselves in a row without images."""
        return content_ids(self.tokens, self.images)

    def sort_key(self, *, wide: bool) -> bytes:
        """Rows in its order share the longest prefixes with their neighbours; `wide` if any of them has images."""
        kind = ">i8" if wide else ">i4"
        if self.marks is None:
            return self.ids.astype(kind).tobytes()
        pairs = np.empty(len(self.tokens), [("token", kind), ("mark", ">u8")])
        pairs["token"], pairs["mark"] = self.ids, self.marks
        return pairs.tobytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpan:
    """The packed positions start..stop, which belong to one adapter."""

    adapter: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionJob:
    """The queries start..stop, which attend to `prefix` and to themselves."""

    start: int
    stop: int
    prefix: tuple[tuple[int, int], ...]
    """Runs (start, stop) of packed positions, in order of depth."""
    mask: np.ndarray | None
    """bool [Q, P + Q]: whether a query sees a key; None means causal without prefix."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """The packed positions start..stop that one row added after its prefix `path` (packed positions), and the rows that
    extend it."""

    start: int
    stop: int
    path: np.ndarray

    @property
    def depth(self) -> int:
        return len(self.path)


@dataclass(frozen=True, kw_only=True)
class PackedTree:
    """The packed tokens [T] and where the rows' positions are."""

    tokens: np.ndarray
    """int32 [T]."""
    positions: np.ndarray
    """int64 [T]: each token's position in its row."""
    index: dict[int, np.ndarray]
    """int64 [N] by row key: the packed position of each position of the row."""
    spans: tuple[AdapterSpan, ...]
    chunks: tuple[Chunk, ...]
    """What each row added, in order."""
    images: tuple[ImageTokens, ...] = ()
    rotary: np.ndarray | None = None
    """int64 [3, T] or [T]: positions for rotary embeddings, if a row has images or long factors; else they are
    `positions`."""

    @cached_property
    def jobs(self) -> tuple[AttentionJob, ...]:
        """The tree's attention in parts. Their masks take seconds for long rows, and FlexAttention reads none."""
        return tuple(_jobs(self.chunks))


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Positions of a tree that are computed at once."""

    tree: PackedTree
    """The positions. Its chunks and attention jobs number those of the path first, then its own."""
    own: np.ndarray
    """int64 [P]: the positions in the whole tree, rising."""
    past: int = 0
    """Length S of its path: what its first position sees before it. No other position of the piece sees more of what is
    before the piece."""
    saves: bool = False
    """Whether it is computed forward only, and its keys and values are saved after the S that are saved already."""
    ancestors: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """int64: those of its own positions, by index in `own`, that later pieces see. These end the next piece's path."""


def sorted_for_packing(rows: Iterable[PackedRow]) -> list[PackedRow]:
    """Rows by adapter and factors, then by tokens, so that neighbours share the longest prefixes."""
    rows = list(rows)
    if any(row.marks is not None for row in rows):
        rows = [row if row.marks is not None else _marked(row) for row in rows]
    wide = any(row.images for row in rows)
    return sorted(rows, key=lambda row: (row.adapter, row.long_factors, row.sort_key(wide=wide)))


def take_rows(
    rows: deque[PackedRow], budget: int, used: int = 0, *, whole_trees: bool = False
) -> tuple[list[PackedRow], int]:
    """Move sorted rows from the front of `rows` into a micro-batch of about `budget` packed tokens.

    `used` tokens are in it already. Returns the rows and the tokens used then. A longer row is taken if the micro-batch
    is empty. A row may exceed the budget by the length of the prefix that it shares with the previous row, which would
    have to be computed again in the next micro-batch. So a prompt that is longer than the budget is shared too. Where
    rows are left over, the last ones taken are put back if the next micro-batch then repeats less: rather than a prompt
    with one of its answers, the whole group comes in the next. With `whole_trees`, an empty micro-batch takes all rows
    that share MIN_SHARED of the budget with the one before them, up to the first that does not, however many these are.
    """
    taken: list[PackedRow] = []
    ends: list[tuple[int, int]] = []
    """(tokens used, prefix shared with the next row) after each row."""
    before, one_tree = used, whole_trees and not used
    while rows:
        shared = _common_prefix(taken[-1], rows[0]) if taken else 0
        if taken:
            ends.append((used, shared))
            one_tree = one_tree and shared >= MIN_SHARED * budget and not rows[0].images
        if used and not one_tree and used + len(rows[0].tokens) - shared > budget + shared:
            break
        used += len(rows[0].tokens) - shared
        taken.append(rows.popleft())
    else:
        return taken, used
    if ends:
        costs = [(shared + MICRO_BATCH_COST) / (end - before) for end, shared in ends]
        keep = min(range(len(ends)), key=lambda index: (costs[index], -index)) + 1
        rows.extendleft(reversed(taken[keep:]))
        taken, used = taken[:keep], ends[keep - 1][0]
    return taken, used


def packed_tokens(rows: Iterable[PackedRow]) -> int:
    """Tokens of the tree of these rows."""
    rows = sorted_for_packing(rows)
    return sum(len(row.tokens) for row in rows) - sum(_common_prefix(*pair) for pair in pairwise(rows))


def pack(rows: Sequence[PackedRow]) -> PackedTree:
    """The tree of these rows, which may come in any order."""
    index: dict[int, np.ndarray] = {}
    chunks: list[Chunk] = []
    spans: list[AdapterSpan] = []
    total = 0
    previous: PackedRow | None = None
    for row in sorted_for_packing(rows):
        shared = _common_prefix(previous, row) if previous is not None else 0
        path = index[previous.key][:shared] if previous is not None else np.empty(0, np.int64)
        start, total = total, total + len(row.tokens) - shared
        if total > start and path.size and path[-1] == start - 1:  # it goes on where the previous row ended
            chunks[-1] = replace(chunks[-1], stop=total)
        elif total > start:
            chunks.append(Chunk(start, total, path))
        index[row.key] = np.concatenate([path, np.arange(start, total)])
        if spans and spans[-1].adapter == row.adapter:
            spans[-1] = AdapterSpan(adapter=row.adapter, start=spans[-1].start, stop=total)
        else:
            spans.append(AdapterSpan(adapter=row.adapter, start=start, stop=total))
        previous = row
    tokens, positions = np.empty(total, np.int32), np.empty(total, np.int64)
    for row in rows:
        tokens[index[row.key]] = row.tokens
        positions[index[row.key]] = np.arange(len(row.tokens))
    return PackedTree(
        tokens=tokens,
        positions=positions,
        index=index,
        spans=tuple(spans),
        chunks=tuple(chunks),
        images=tuple(_images(rows, index)),
        rotary=_rotary(rows, index, positions),
    )


def cut(tree: PackedTree, budget: int) -> tuple[Piece, ...] | None:
    """The pieces of the tree, which must have no images, of at most `budget` positions, in the order in which they are
    computed; None if it stays whole."""
    if len(tree.tokens) <= (LONG_ROW * budget if len(tree.chunks) == 1 else budget):
        return None
    bounds = [0, *_cuts(tree.positions, budget), len(tree.tokens)]
    pieces: list[Piece] = []
    saved = np.empty(0, np.int64)
    for start, stop in reversed(list(pairwise(bounds))):
        path = _path(tree, start)
        shared = int(np.searchsorted(saved, start))  # what is saved before the piece is on its path too
        for first in range(shared, len(path), budget):
            own = path[first : first + budget]
            pieces.append(Piece(tree=_part(tree, path[:first], own), own=own, past=first, saves=True))
        own = np.arange(start, stop)
        pieces.append(Piece(tree=_part(tree, path, own), own=own, past=len(path), ancestors=saved[shared:] - start))
        saved = path
    return tuple(pieces)


def contiguous_runs(positions: np.ndarray) -> tuple[tuple[int, int], ...]:
    """Rising positions as runs (start, stop): [0 1 2 7 8] -> ((0, 3), (7, 9))."""
    if not positions.size:
        return ()
    cuts = np.flatnonzero(np.diff(positions) != 1) + 1
    return tuple((int(run[0]), int(run[-1]) + 1) for run in np.split(positions, cuts))


def _images(rows: Sequence[PackedRow], index: dict[int, np.ndarray]) -> Iterator[ImageTokens]:
    """The images of the rows; tokens that rows share once."""
    seen = set[int]()
    for row in rows:
        for image in row.images:
            at = index[row.key][image.start : image.start + image.length]
            new = np.array([position not in seen for position in at.tolist()])
            seen.update(at.tolist())
            yield ImageTokens(image, at[new], np.flatnonzero(new))


def _rotary(rows: Sequence[PackedRow], index: dict[int, np.ndarray], positions: np.ndarray) -> np.ndarray | None:
    with_images = any(row.images for row in rows)
    if not with_images and not any(row.long_factors for row in rows):
        return None
    rotary = np.broadcast_to(positions, (3, len(positions)) if with_images else positions.shape).copy()
    for row in rows:
        of_row = rotary_positions(len(row.tokens), row.images) if with_images else np.arange(len(row.tokens))
        rotary[..., index[row.key]] = ~of_row if row.long_factors else of_row  # complements: see `longrope`
    return rotary


def _common_prefix(left: PackedRow, right: PackedRow) -> int:
    """Length of the common prefix; 0 for rows of different adapters or factors."""
    if (left.adapter, left.long_factors) != (right.adapter, right.long_factors):
        return 0
    length = min(len(left.tokens), len(right.tokens))
    differs = left.ids[:length] != right.ids[:length]
    if left.marks is not None and right.marks is not None:
        differs |= left.marks[:length] != right.marks[:length]
    first = np.flatnonzero(differs)
    return int(first[0]) if first.size else length


def _marked(row: PackedRow) -> PackedRow:
    return replace(row, marks=np.zeros(len(row.tokens), np.uint64))


def _jobs(chunks: Sequence[Chunk]) -> Iterator[AttentionJob]:
    """One job for each long chunk, and for several short ones."""
    merged: list[Chunk] = []
    for chunk in chunks:
        if merged and chunk.stop - merged[0].start > MAX_MERGED_QUERIES:
            yield _job(merged)
            merged = []
        merged.append(chunk)
    if merged:
        yield _job(merged)


def _job(chunks: Sequence[Chunk]) -> AttentionJob:
    """The job of neighbouring chunks.

    The first chunk's prefix holds every prefix position that the later ones need, because they branch off its path.
    """
    first, stop = chunks[0], chunks[-1].stop
    prefix = contiguous_runs(first.path)
    if len(chunks) == 1 and not first.depth:
        return AttentionJob(start=first.start, stop=stop, prefix=prefix, mask=None)
    mask = np.zeros((stop - first.start, first.depth + stop - first.start), bool)
    for chunk in chunks:
        queries = slice(chunk.start - first.start, chunk.stop - first.start)
        own = first.depth + queries.start
        # A path position is a key of this job itself, or the column of its depth in the shared prefix.
        inside = chunk.path >= first.start
        columns = np.where(inside, chunk.path - first.start + first.depth, np.arange(chunk.depth))
        mask[queries, columns] = True
        mask[queries, own : own + chunk.stop - chunk.start] = np.tri(chunk.stop - chunk.start, dtype=bool)
    return AttentionJob(start=first.start, stop=stop, prefix=prefix, mask=mask)


def _cuts(positions: np.ndarray, budget: int) -> Iterator[int]:
    """First positions of all pieces but the first. A cut costs the depth of the position that it is made at."""
    start = 0
    while len(positions) - start > budget:
        first = start + (budget + 1) // 2
        costs = (positions[first : start + budget + 1] + MICRO_BATCH_COST) / np.arange(first - start, budget + 1)
        start = first + len(costs) - 1 - int(np.argmin(costs[::-1]))  # the last of equals
        yield start


def _path(tree: PackedTree, at: int) -> np.ndarray:
    """The positions that the position `at` sees, without itself."""
    chunk = next(chunk for chunk in tree.chunks if chunk.start <= at < chunk.stop)
    return np.concatenate([chunk.path, np.arange(chunk.start, at)])


def _part(tree: PackedTree, before: np.ndarray, own: np.ndarray) -> PackedTree:
    """Some positions of the tree, whose chunks number the positions before them first, then their own."""
    numbers, chunks = np.zeros(len(tree.tokens), np.int64), []
    numbers[before], numbers[own] = np.arange(len(before)), np.arange(len(before), len(before) + len(own))
    for chunk in tree.chunks:
        low, high = np.searchsorted(own, [chunk.start, chunk.stop]).tolist()
        if low < high:
            first, last = int(own[low]), int(own[high - 1])
            path = np.concatenate([chunk.path, np.arange(chunk.start, first)])
            chunks.append(Chunk(int(numbers[first]), int(numbers[last]) + 1, numbers[path]))
    edges = [np.searchsorted(own, [span.start, span.stop]).tolist() for span in tree.spans]
    spans = [
        replace(span, start=low, stop=high) for span, (low, high) in zip(tree.spans, edges, strict=True) if low < high
    ]
    return replace(
        tree,
        tokens=tree.tokens[own],
        positions=tree.positions[own],
        index={},
        spans=tuple(spans),
        chunks=tuple(chunks),
        rotary=None if tree.rotary is None else tree.rotary[..., own],
    )
