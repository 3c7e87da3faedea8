"""The tables of a `ChunkTree` for kernels that go through its chunks one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine.model.hybrid.chunk_tree import ChunkTree, Level


@dataclass(frozen=True, slots=True)
class ScanTables:
    """The tree for kernels that go through its chunks one after the other. Tables are int32 but `ends`."""

    tokens: Tensor
    """[N, size]: token of each slot; -1 for padding."""
    initial: Tensor
    """[N]: number of the state in which a chunk starts; -1 for zeros, -2, -3, ... for the outside states 0, 1, ..."""
    final: Tensor
    """[N]: number of the state after a chunk that has children or whose end is wanted, else -1."""
    order: Tensor
    """[N]: the chunks, each after its parent, those of one root together."""
    bounds: Tensor
    """[roots + 1]: where each root's chunks begin in `order`."""
    ends: Tensor
    """int64 [ends]: the states that are wanted."""
    states: int
    """How many are stored."""

    @classmethod
    def of(cls, tree: ChunkTree, device: torch.device) -> ScanTables:
        """The tables, copied to the device together."""
        parents, initial = _parents(tree.levels)
        count, roots = len(parents), tree.levels[0].stop
        root, stored = np.arange(count), np.zeros(count, bool)
        ends = np.zeros(sum(len(level.ends) for level in tree.levels), np.int64)
        for level in tree.levels:
            own = slice(level.start, level.stop)
            if level.start:
                root[own] = root[parents[own]]
            for chunk, number in level.ends:
                ends[number] = level.start + chunk
        stored[parents[parents >= 0]] = stored[ends] = True
        final = np.where(stored, np.cumsum(stored) - 1, -1)
        order = np.argsort(root, kind="stable")
        parts = {
            "tokens": np.where(tree.tokens == len(tree.slots), -1, tree.tokens).reshape(-1),
            "initial": np.where(parents >= 0, final[parents], initial),
            "final": final,
            "order": order,
            "bounds": np.searchsorted(root[order], np.arange(roots + 1)),
        }
        numbers = torch.as_tensor(np.concatenate([*parts.values()]).astype(np.int32), device=device)
        tables = dict(zip(parts, numbers.split([len(part) for part in parts.values()]), strict=True))
        return cls(**tables, ends=torch.as_tensor(final[ends], device=device), states=int(stored.sum()))


def _parents(levels: Sequence[Level]) -> tuple[np.ndarray, np.ndarray]:
    """int64 [N]: each chunk's parent or -1, and `ScanTables.initial` of those without one."""
    parents, initial = np.full(levels[-1].stop, -1), np.full(levels[-1].stop, -1)
    initial[: levels[0].stop] = np.where(levels[0].parents < 0, -1, -2 - levels[0].parents)
    for before, level in pairwise(levels):
        parents[level.start : level.stop] = before.start + level.parents
    return parents, initial
