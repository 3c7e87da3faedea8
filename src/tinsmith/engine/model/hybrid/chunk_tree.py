"""The tokens of a packed pass cut into the chunks in which recurrent layers compute them.

A recurrent layer carries a state from token to token. Tokens are cut at forks and then every `size` tokens, so that a
chunk begins where another one ends; chunks of one depth are computed together, each from the end state of its parent.
The depth of the tree in chunks is the number of sequential steps. A chunk may also begin at a state from outside the
pass, the end of a cached prefix.

Everything here is numpy, computed once for a pass and used by every recurrent layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tinsmith.engine.model.packing import PackedTree

SIZES = (8, 16, 32, 64)
"""Tokens of a chunk: fewer where rows fork often, so that little is padded."""


@dataclass(frozen=True, slots=True)
class Level:
    """The chunks start..stop, all of one depth."""

    start: int
    stop: int
    parents: np.ndarray
    """int64 [stop - start]: index in the level before; in the first level the outside state, or -1 for none."""
    ends: tuple[tuple[int, int], ...]
    """(chunk in this level, number in `ends`) of chunks whose end states are wanted."""


@dataclass(frozen=True, slots=True)
class ChunkTree:
    """C tokens in N chunks of `size`, ordered by depth."""

    size: int
    tokens: np.ndarray
    """int64 [N, size]: token of each slot; C for padding, which follows the tokens of a chunk."""
    slots: np.ndarray
    """int64 [C]: index of each token in the flat `tokens`."""
    levels: tuple[Level, ...]
    ancestors: np.ndarray
    """int64 [C, taps]: a token and those before it on its path, nearest first, as an index into C tokens, a row of
    zeros, and taps - 1 rows of each outside state, nearest last."""
    end_taps: np.ndarray
    """int64 [ends, taps - 1]: the same for the last tokens up to each end, nearest last."""


def parents_of(tree: PackedTree) -> np.ndarray:
    """int64 [T]: the packed position before each token on its row; -1 for a row's first token."""
    parents = np.full(len(tree.tokens), -1)
    for path in tree.index.values():
        parents[path[1:]] = path[:-1]
    return parents


def chunk_tree(
    parents: np.ndarray, taps: int, *, starts: Mapping[int, int] | None = None, ends: Sequence[int] = ()
) -> ChunkTree:
    """The chunks of a pass.

    `parents` [C] is the token before each token, which comes earlier in the pass, or -1. `starts` gives the outside
    state (0, 1, ...) from which a token starts, if it starts from one; states are wanted after the tokens `ends`.
    """
    starts = starts or {}
    linked = parents.copy()
    linked[list(starts)] = -1
    nodes = _nodes(linked, starts, ends)
    size = min(SIZES, key=lambda size: _work(nodes, size))
    firsts = np.concatenate([np.arange(start, stop, size) for start, stop in nodes])
    lengths = np.diff([*firsts, len(linked)])
    chunk_of = np.repeat(np.arange(len(firsts)), lengths)
    above = np.where(linked[firsts] >= 0, chunk_of[linked[firsts]], -1)
    depth = np.zeros(len(firsts), np.int64)
    for chunk, parent in enumerate(above):
        depth[chunk] = depth[parent] + 1 if parent >= 0 else 0
    order = np.argsort(depth, kind="stable")
    rank = np.argsort(order)
    slots = rank[chunk_of] * size + np.arange(len(linked)) - firsts[chunk_of]
    tokens = np.full(len(firsts) * size, len(linked))
    tokens[slots] = np.arange(len(linked))
    outside = np.array([starts.get(int(first), -1) for first in firsts])
    table = _ancestors(linked, taps, starts)
    return ChunkTree(
        size=size,
        tokens=tokens.reshape(-1, size),
        slots=slots,
        levels=_levels(depth[order], np.where(above < 0, outside, rank[above])[order], rank[chunk_of[list(ends)]]),
        ancestors=table,
        end_taps=table[list(ends), : taps - 1][:, ::-1].copy(),
    )


def _nodes(linked: np.ndarray, starts: Mapping[int, int], ends: Sequence[int]) -> list[tuple[int, int]]:
    """Runs (start, stop) of tokens without a fork, an outside state or an end inside."""
    number = np.arange(len(linked))
    begins = linked != number - 1
    begins[:1] = True
    forks = linked[begins & (linked >= 0)]
    begins[[cut for cut in (*(forks + 1), *(np.array(ends, np.int64) + 1), *starts) if cut < len(linked)]] = True
    bounds = [*np.flatnonzero(begins).tolist(), len(linked)]
    return list(pairwise(bounds))


def _work(nodes: Sequence[tuple[int, int]], size: int) -> int:
    """Estimate of the time that chunks of this size take: a triangular system, products and elementwise operations in
    the matrix of a chunk, products with its state, and what each sequential step costs. Fitted for heads of 32 to 128.
    """
    chunks = sum(-(-(stop - start) // size) for start, stop in nodes)
    return chunks * (size**3 + 272 * size**2 + 12288 * size + 250_000)


def _levels(depth: np.ndarray, parents: np.ndarray, ends: np.ndarray) -> tuple[Level, ...]:
    """The levels of ordered chunks; `parents` are numbers of chunks, outside states in the first level."""
    bounds = np.searchsorted(depth, np.arange(int(depth[-1]) + 2)).tolist()
    levels = list[Level]()
    for level, (start, stop) in enumerate(pairwise(bounds)):
        before = bounds[level - 1] if level else 0
        wanted = tuple((int(chunk) - start, number) for number, chunk in enumerate(ends) if start <= chunk < stop)
        levels.append(Level(start, stop, parents[start:stop] - before, wanted))
    return tuple(levels)


def _ancestors(linked: np.ndarray, taps: int, starts: Mapping[int, int]) -> np.ndarray:
    count, rows = len(linked), taps - 1
    outside = count + 1 + np.arange(rows * (max(starts.values(), default=-1) + 1))
    before_outside = np.where((outside - count - 1) % max(rows, 1) == 0, count, outside - 1)
    before = np.concatenate([np.where(linked < 0, count, linked), [count], before_outside]).astype(np.int64)
    for token, number in starts.items():
        before[token] = count + (number + 1) * rows
    columns = [np.arange(count)]
    for _ in range(rows):
        columns.append(before[columns[-1]])
    return np.stack(columns, axis=1)
