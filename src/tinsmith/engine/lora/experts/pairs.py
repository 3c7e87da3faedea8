"""Pairs of a token and one of its experts, sorted for the products of a pass.

The order is by expert, then by the adapter's place in the pass, then by token. A frozen product needs the pairs of an
expert, an adapter's product the pairs of an expert and an adapter: both are contiguous.

oneDNN compiles a product for each number of rows, which takes longer than a product of a few hundred rows, and keeps
the last 1,024. Routers give each expert another number of tokens, in each layer and pass. So where oneDNN multiplies,
the pairs of an expert and an adapter are padded to one of eight numbers between two powers of two (`padded_count`),
with copies of the last pair that have weight 0: no result of theirs is read, and they add 0 to sums over pairs.

Where most experts have a few pairs each, all are padded to the same number of rows, the block, and a product of all
experts is one batched product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from operator import itemgetter

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine.lora.adapter import AdapterWeights, PlacedAdapter

MIN_GROUP_ROWS = 2
"""An adapter with fewer pairs for each of its experts on average multiplies each pair with a copy of its matrix."""

MIN_BLOCK_EXPERTS = 3 / 4
"""The part of the experts that must have pairs for a batched product, which reads the matrices of all."""
MAX_BLOCK_ROWS = 64
"""The most pairs that an expert may have for it: a product of so few rows takes little longer than reading its matrix,
so padding costs little, and each call that is saved takes 20 microseconds."""

Run = tuple[int, int, int]
"""An expert and its pairs, from start to stop."""
Group = tuple[int, int, int, int]
"""An expert, the adapter's number, and their pairs, from start to stop."""


@dataclass(frozen=True, slots=True)
class AdapterPairs:
    """The pairs of one adapter, which serves the tokens of `rows`."""

    weights: AdapterWeights
    rows: slice
    positions: Tensor
    """int64 [P']: the adapter's pairs among all pairs, with their padding."""
    local: Tensor
    """int64 [P']: the token of each, counted from the adapter's first."""
    experts: Tensor
    """int64 [P']."""
    runs: tuple[tuple[int, int, int, int], ...]
    """(expert, start, stop, first) of its groups: pairs start..stop of all, from `first` on among its own."""
    by_token: Tensor
    """int64 [n, k]: own pairs of each token, by expert."""
    run_experts: Tensor
    """int64 [groups]: the expert of each group."""
    block: int = 0
    """Rows of each expert if all have the same number, and all rows are of this adapter; else 0."""

    @property
    def few(self) -> bool:
        """Whether each pair is multiplied with a copy of its matrix."""
        return not self.block and len(self.positions) < MIN_GROUP_ROWS * len(self.runs)

    def product(self, rows: Tensor, matrices: Tensor) -> Tensor:
        """Rows of all pairs [P, in] times the matrix of their experts [E, in, out] -> own pairs [P', out]."""
        if self.block:
            return torch.bmm(blocks_of(rows, self.block), matrices).flatten(0, 1)
        if self.few:
            return torch.bmm(rows[self.positions, None], matrices[self.experts])[:, 0]
        output = rows.new_empty(len(self.positions), matrices.shape[2])
        for expert, start, stop, first in self.runs:
            torch.mm(rows[start:stop], matrices[expert], out=output[first : first + stop - start])
        return output

    def add_product(self, target: Tensor, rows: Tensor, matrices: Tensor) -> None:
        """Add s times own rows [P', in] times the matrix of their experts [E, in, out] to all pairs [P, out]."""
        scale = self.weights.scale
        if self.block:
            blocks_of(target, self.block).baddbmm_(blocks_of(rows, self.block), matrices, alpha=scale)
            return
        if self.few:
            target.index_add_(0, self.positions, torch.bmm(rows[:, None], matrices[self.experts])[:, 0], alpha=scale)
            return
        for expert, start, stop, first in self.runs:
            target[start:stop].addmm_(rows[first : first + stop - start], matrices[expert], alpha=scale)

    def group_product(self, rows: Tensor, matrices: Tensor) -> Tensor:
        """Rows of all pairs [P, in] times the matrix of their group [groups, in, out] -> own pairs [P', out]."""
        if self.block:
            return self.product(rows, matrices)
        output = rows.new_empty(len(self.positions), matrices.shape[2])
        for (_, start, stop, first), matrix in zip(self.runs, matrices.unbind(), strict=True):
            torch.mm(rows[start:stop], matrix, out=output[first : first + stop - start])
        return output

    def add_group_product(self, target: Tensor, rows: Tensor, matrices: Tensor) -> None:
        """Add s times own rows [P', in] times the matrix of their group [groups, in, out] to all pairs [P, out]."""
        if self.block:
            self.add_product(target, rows, matrices)
            return
        for (_, start, stop, first), matrix in zip(self.runs, matrices.unbind(), strict=True):
            target[start:stop].addmm_(rows[first : first + stop - start], matrix, alpha=self.weights.scale)

    def outer(self, own: Tensor, rows: Tensor) -> Tensor:
        """Sums over each group of the outer products of own rows [P', r] and rows of all pairs [P, out]:
        [groups, r, out]."""
        if self.block:
            return torch.bmm(blocks_of(own, self.block).mT, blocks_of(rows, self.block))
        sums = rows.new_empty(len(self.runs), own.shape[1], rows.shape[1])
        for (_, start, stop, first), target in zip(self.runs, sums.unbind(), strict=True):
            torch.mm(own[first : first + stop - start].T, rows[start:stop], out=target)
        return sums

    def add_outer(self, buffer: Tensor, sums: Tensor) -> None:
        """Add s times the sums of groups [groups, r, out] to their experts' rows of `buffer` [E, r, out]."""
        buffer.index_add_(0, self.run_experts, sums.to(buffer.dtype), alpha=self.weights.scale)

    def sum_of_tokens(self, own: Tensor) -> Tensor:
        """Sums over the experts of each token: [P', r] -> [n, r]."""
        return sum_of_rows(own, self.by_token)


@dataclass(frozen=True, slots=True)
class ExpertPairs:
    """The P pairs of a pass in one layer: T k, and their padding."""

    order: Tensor
    """int64 [P]: each pair's index in the flattened [T, k]."""
    is_padding: Tensor | None
    """bool [P]; None if no pair is."""
    places: Tensor
    """int64 [T k]: where each pair of the flattened [T, k] is."""
    tokens: Tensor
    """int64 [P]."""
    sorted_experts: Tensor
    """int64 [P]."""
    by_token: Tensor
    """int64 [T, k]: the pairs of each token, by expert."""
    experts: tuple[Run, ...]
    """The experts that any token has chosen; all of them in a block."""
    adapters: tuple[AdapterPairs, ...]
    block: int
    """Rows of each expert if all have the same number; else 0."""

    def sum_of_tokens(self, rows: Tensor) -> Tensor:
        """Sums over the experts of each token: [P, D] -> [T, D]."""
        return sum_of_rows(rows, self.by_token)

    def sorted(self, weights: Tensor) -> Tensor:
        """Weights of experts [T, k] -> [P] in the order of the pairs, 0 for padding."""
        values = weights.flatten()[self.order]
        return values if self.is_padding is None else values.masked_fill_(self.is_padding, 0)

    def unsorted(self, values: Tensor) -> Tensor:
        """[P] in the order of the pairs -> [T, k]."""
        return values[self.places].view(self.by_token.shape)

    @staticmethod
    def sum_dtype(dtype: torch.dtype) -> torch.dtype:
        """The dtype that sums of this dtype are computed in."""
        return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True, slots=True)
class Activations:
    """What the forward of a layer's experts computes; all but `output` is for the backward.

    In `loops` the factors of adapters are by adapter, over its n tokens; in `grouped` they are by kind of adapters,
    over all T tokens and times their s. Where the experts share no matrix they are those of the pairs.
    """

    output: Tensor
    """[T, D]."""
    wide: Tensor
    """[P, out]: the product before the gate, in the order of the pairs."""
    narrow: list[Tensor]
    """A1 x and A3 x [n, sites * rank]."""
    weighted: list[Tensor]
    """sum_e w_e A2_e h_e [n, rank]; of a pair w_e A2_e h_e."""


def sort_pairs(index: Tensor, placed: Sequence[PlacedAdapter], *, experts: int = 0, pads: bool = False) -> ExpertPairs:
    """Expert ids [T, k] -> the sorted pairs, with those of each adapter, which are placed in the order of tokens.

    `pads`: whether to pad the pairs of each expert and adapter. All `experts` are padded to a block where these have
    few pairs each, all of one adapter; 0 for never.
    """
    owner = torch.zeros(len(index), dtype=torch.int64)
    for number, (_, start, stop) in enumerate(placed, 1):
        owner[start:stop] = number
    owners = len(placed) + 1
    keys, order = (index * owners + owner.to(index.device)[:, None]).flatten().sort(stable=True)
    unique, sizes = (values.tolist() for values in torch.unique_consecutive(keys, return_counts=True))
    counts = [padded_count(size) for size in sizes] if pads else sizes
    block = _block(unique, sizes, owners, experts)
    if block:
        of_key = dict(zip(unique, sizes, strict=True))
        unique = range(unique[0] % owners, experts * owners, owners)
        sizes, counts = [of_key.get(key, 0) for key in unique], [block] * experts
    places, is_padding = torch.empty_like(order), None
    if counts == sizes:
        places[order] = torch.arange(len(order), device=index.device)
    else:
        pair_of_row, padding = _padded_rows(np.array(sizes), np.array(counts))
        places[order] = torch.from_numpy(np.flatnonzero(~padding)).to(index.device)
        rows, is_padding = (torch.from_numpy(each).to(index.device) for each in (pair_of_row, padding))
        keys, order = torch.from_numpy(np.repeat(unique, counts)).to(index.device), order[rows]
    groups = [
        (key // owners, key % owners, stop - count, stop)
        for key, count, stop in zip(unique, counts, accumulate(counts), strict=True)
    ]
    tokens, of_expert = order // index.shape[1], keys // owners
    by_token = places.view(index.shape).sort(dim=1).values
    adapters = _adapter_pairs(placed, groups, keys % owners, tokens, of_expert, by_token, block) if placed else ()
    runs = tuple(_expert_runs(groups))
    return ExpertPairs(order, is_padding, places, tokens, of_expert, by_token, runs, tuple(adapters), block)


def _block(keys: Sequence[int], sizes: Sequence[int], owners: int, experts: int) -> int:
    """Rows of each expert if all are padded to the same number; else 0."""
    is_dense = len(keys) >= MIN_BLOCK_EXPERTS * experts > 0 and len({key % owners for key in keys}) == 1
    return padded_count(max(sizes)) if is_dense and max(sizes) <= MAX_BLOCK_ROWS else 0


def padded_count(count: int) -> int:
    """The next number whose last bits after the first four are 0: up to an eighth more."""
    step = 1 << max(0, count.bit_length() - 4)
    return -(-count // step) * step


def _padded_rows(sizes: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The sorted pair of each row, int64 [P], and which rows are padding, bool [P], of groups with these numbers of
    pairs and of rows."""
    row_of_group = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    last = np.repeat(sizes - 1, counts)
    firsts = np.repeat(np.cumsum(sizes) - sizes, counts)
    return firsts + np.minimum(row_of_group, last), row_of_group > last


def _expert_runs(groups: Sequence[Group]) -> Iterator[Run]:
    """Neighbouring groups of one expert as one run."""
    for expert, of_expert in groupby(groups, key=itemgetter(0)):
        bounds = [(start, stop) for _, _, start, stop in of_expert]
        yield expert, bounds[0][0], bounds[-1][1]


def _adapter_pairs(
    placed: Sequence[PlacedAdapter],
    groups: Sequence[Group],
    owners: Tensor,
    tokens: Tensor,
    experts: Tensor,
    by_token: Tensor,
    block: int,
) -> Iterator[AdapterPairs]:
    """The pairs of each adapter; owners, tokens and experts [P] are those of all pairs."""
    runs: list[list[tuple[int, int, int, int]]] = [[] for _ in range(len(placed) + 1)]
    taken = [0] * len(runs)
    for expert, owner, start, stop in groups:
        runs[owner].append((expert, start, stop, taken[owner]))
        taken[owner] += stop - start
    of_owner = owners.argsort(stable=True).split(taken)
    for number, (weights, start, stop) in enumerate(placed, 1):
        positions, own = of_owner[number], tuple(runs[number])
        yield AdapterPairs(
            weights=weights,
            rows=slice(start, stop),
            positions=positions,
            local=tokens[positions] - start,
            experts=experts[positions],
            runs=own,
            by_token=torch.searchsorted(positions, by_token[start:stop]),
            run_experts=torch.tensor([expert for expert, *_ in own], dtype=torch.int64, device=tokens.device),
            block=block if own else 0,
        )


def blocks_of(rows: Tensor, block: int) -> Tensor:
    """Rows [E block, N] as [E, block, N]."""
    return rows.unflatten(0, (-1, block))


def sum_of_rows(rows: Tensor, by_token: Tensor) -> Tensor:
    """Sums of rows [P, D] over each row of `by_token` [T, k] -> [T, D], term by term and at least in float32."""
    return torch.nn.functional.embedding_bag(by_token, rows, mode="sum")
