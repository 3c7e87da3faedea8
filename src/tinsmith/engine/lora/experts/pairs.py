"""Pairs of a token and one of its experts, sorted for the products of a pass.

The order is by expert, then by the adapter's place in the pass, then by token. A frozen product needs the pairs of an
expert, an adapter's product the pairs of an expert and an adapter: both are contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from tinsmith.engine.lora.adapter import AdapterWeights, PlacedAdapter

MIN_GROUP_ROWS = 2
"""An adapter with fewer pairs for each of its experts on average multiplies each pair with a copy of its matrix."""

Run = tuple[int, int, int]
"""An expert and its pairs, from start to stop."""


@dataclass(frozen=True, slots=True)
class AdapterPairs:
    """The pairs of one adapter, which serves the tokens of `rows`."""

    weights: AdapterWeights
    rows: slice
    positions: Tensor
    """int64 [P']: the adapter's pairs among all pairs."""
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

    @property
    def few(self) -> bool:
        """Whether each pair is multiplied with a copy of its matrix."""
        return len(self.positions) < MIN_GROUP_ROWS * len(self.runs)

    def product(self, rows: Tensor, matrices: Tensor) -> Tensor:
        """Rows of all pairs [P, in] times the matrix of their experts [E, in, out] -> own pairs [P', out]."""
        if self.few:
            return torch.bmm(rows[self.positions, None], matrices[self.experts])[:, 0]
        output = rows.new_empty(len(self.positions), matrices.shape[2])
        for expert, start, stop, first in self.runs:
            torch.mm(rows[start:stop], matrices[expert], out=output[first : first + stop - start])
        return output

    def add_product(self, target: Tensor, rows: Tensor, matrices: Tensor) -> None:
        """Add s times own rows [P', in] times the matrix of their experts [E, in, out] to all pairs [P, out]."""
        scale = self.weights.scale
        if self.few:
            target.index_add_(0, self.positions, torch.bmm(rows[:, None], matrices[self.experts])[:, 0], alpha=scale)
            return
        for expert, start, stop, first in self.runs:
            target[start:stop].addmm_(rows[first : first + stop - start], matrices[expert], alpha=scale)

    def group_product(self, rows: Tensor, matrices: Tensor) -> Tensor:
        """Rows of all pairs [P, in] times the matrix of their group [groups, in, out] -> own pairs [P', out]."""
        output = rows.new_empty(len(self.positions), matrices.shape[2])
        for (_, start, stop, first), matrix in zip(self.runs, matrices.unbind(), strict=True):
            torch.mm(rows[start:stop], matrix, out=output[first : first + stop - start])
        return output

    def add_group_product(self, target: Tensor, rows: Tensor, matrices: Tensor) -> None:
        """Add s times own rows [P', in] times the matrix of their group [groups, in, out] to all pairs [P, out]."""
        for (_, start, stop, first), matrix in zip(self.runs, matrices.unbind(), strict=True):
            target[start:stop].addmm_(rows[first : first + stop - start], matrix, alpha=self.weights.scale)

    def outer(self, own: Tensor, rows: Tensor) -> Tensor:
        """Sums over each group of the outer products of own rows [P', r] and rows of all pairs [P, out]:
        [groups, r, out]."""
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
    """The P = T k pairs of a pass in one layer."""

    order: Tensor
    """int64 [P]: each pair's index in the flattened [T, k]."""
    tokens: Tensor
    """int64 [P]."""
    sorted_experts: Tensor
    """int64 [P]."""
    by_token: Tensor
    """int64 [T, k]: the pairs of each token, by expert."""
    experts: tuple[Run, ...]
    """The experts that any token has chosen."""
    adapters: tuple[AdapterPairs, ...]

    def sum_of_tokens(self, rows: Tensor) -> Tensor:
        """Sums over the experts of each token: [P, D] -> [T, D]."""
        return sum_of_rows(rows, self.by_token)

    def unsorted(self, values: Tensor) -> Tensor:
        """[P] in the order of the pairs -> [T, k]."""
        return torch.empty_like(values).index_copy_(0, self.order, values).view(self.by_token.shape)

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


def sort_pairs(index: Tensor, placed: Sequence[PlacedAdapter]) -> ExpertPairs:
    """Expert ids [T, k] -> the sorted pairs, with those of each adapter, which are placed in the order of tokens."""
    owner = torch.zeros(len(index), dtype=torch.int64)
    for number, (_, start, stop) in enumerate(placed, 1):
        owner[start:stop] = number
    owners = len(placed) + 1
    keys, order = (index * owners + owner.to(index.device)[:, None]).flatten().sort(stable=True)
    tokens, experts = order // index.shape[1], keys // owners
    groups, counts = (values.tolist() for values in torch.unique_consecutive(keys, return_counts=True))
    starts = [0, *accumulate(counts)]
    runs: list[Run] = []
    for key, start, count in zip(groups, starts, counts, strict=False):
        if runs and runs[-1][0] == key // owners:
            runs[-1] = (runs[-1][0], runs[-1][1], start + count)
        else:
            runs.append((key // owners, start, start + count))
    by_token = tokens.argsort(stable=True).view(index.shape)
    pairs = ExpertPairs(order, tokens, experts, by_token, tuple(runs), ())
    if not placed:
        return pairs
    of_owner: list[list[tuple[int, int, int, int]]] = [[] for _ in range(owners)]
    taken = [0] * owners
    for key, start, count in zip(groups, starts, counts, strict=False):
        number = key % owners
        of_owner[number].append((key // owners, start, start + count, taken[number]))
        taken[number] += count
    split = (keys % owners).argsort(stable=True).split(taken)
    adapters = []
    for number, (weights, start, stop) in enumerate(placed, 1):
        positions = split[number]
        local = tokens[positions] - start
        pairs_of_token = local.argsort(stable=True).view(stop - start, index.shape[1])
        own = tuple(of_owner[number])
        run_experts = torch.tensor([expert for expert, *_ in own], dtype=torch.int64, device=index.device)
        adapters.append(
            AdapterPairs(
                weights, slice(start, stop), positions, local, experts[positions], own, pairs_of_token, run_experts
            )
        )
    return ExpertPairs(order, tokens, experts, by_token, tuple(runs), tuple(adapters))


def sum_of_rows(rows: Tensor, by_token: Tensor) -> Tensor:
    """Sums of rows [P, D] over each row of `by_token` [T, k] -> [T, D], term by term and at least in float32."""
    return torch.nn.functional.embedding_bag(by_token, rows, mode="sum")
