"""The tables of a `ChunkTree` as tensors on a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine.model.hybrid.chunk_tree import ChunkTree
from tinsmith.engine.model.hybrid.rule.scan_tables import ScanTables


@dataclass(frozen=True, slots=True)
class TensorLevel:
    """A level of the tree; see `chunk_tree.Level`."""

    start: int
    stop: int
    parents: Tensor | None
    """None if each chunk continues the one of the same index, or, in the first level, if all start from zeros."""
    ends: Tensor
    """int64 [n]: chunks of this level whose end states are wanted."""
    end_numbers: Tensor
    """int64 [n]: their numbers among all ends."""


@dataclass(frozen=True)
class ChunkTensors:
    """C tokens in N chunks of `size`, with `taps` inputs of the convolution for each. Tables of the chunks' order are
    made where they are first used: a pass needs `levels` or `scan`."""

    tree: ChunkTree
    padding: Tensor | None
    """bool [N size]: slots after a chunk's tokens; None without any."""
    slots: Tensor
    """int64 [C]: slot of each token."""
    inputs: Tensor
    """int64 [N (taps - 1 + size)]: of each chunk, the taps - 1 tokens before it, as `ChunkTree.ancestors` names them,
    and its own. Padding repeats the chunk's last token, so that no other row's numbers are in it."""
    own_inputs: Tensor
    """int64 [C]: index of each token in `inputs`."""
    earlier: Tensor
    """int64: tokens of the pass that are in `inputs` before a chunk, with repetitions."""
    earlier_inputs: Tensor
    """int64: their indices in `inputs`."""
    end_taps: Tensor

    @classmethod
    def of(cls, tree: ChunkTree, device: torch.device) -> ChunkTensors:
        """The tree's tables as tensors."""

        def tensor(table: object) -> Tensor:
            return torch.as_tensor(table, dtype=torch.int64, device=device)

        count, earlier = len(tree.slots), tree.ancestors.shape[1] - 1
        padding = tree.tokens == count
        lasts = np.where(padding, -1, tree.tokens).max(1, keepdims=True)
        tokens = np.where(padding, lasts, tree.tokens)
        inputs = np.concatenate([tree.ancestors[tokens[:, 0], :0:-1], tokens], 1)
        at = np.arange(inputs.size).reshape(inputs.shape)
        halo = inputs[:, :earlier] < count
        return cls(
            tree=tree,
            padding=torch.as_tensor(padding.reshape(-1), device=device) if padding.any() else None,
            slots=tensor(tree.slots),
            inputs=tensor(inputs.reshape(-1)),
            own_inputs=tensor(at[:, earlier:].reshape(-1)[tree.slots]),
            earlier=tensor(inputs[:, :earlier][halo]),
            earlier_inputs=tensor(at[:, :earlier][halo]),
            end_taps=tensor(tree.end_taps),
        )

    @cached_property
    def levels(self) -> Sequence[TensorLevel]:
        """The levels of the tree, from the roots on."""

        def tensor(table: object) -> Tensor:
            return torch.as_tensor(table, dtype=torch.int64, device=self.slots.device)

        levels, before = [], -1
        for level in self.tree.levels:
            count = level.stop - level.start
            same = level.parents.tolist() == ([-1] * count if before < 0 else list(range(before)))
            ends = tensor(level.ends).view(-1, 2)
            parents = None if same else tensor(level.parents)
            levels.append(TensorLevel(level.start, level.stop, parents, ends[:, 0], ends[:, 1]))
            before = count
        return levels

    @cached_property
    def scan(self) -> ScanTables:
        """The tree for kernels."""
        return ScanTables.of(self.tree, self.slots.device)

    @property
    def size(self) -> int:
        """Tokens of a chunk."""
        return self.tree.size

    @property
    def taps(self) -> int:
        return len(self.inputs) * self.size // self.total_slots - self.size + 1

    @property
    def total_slots(self) -> int:
        """N times size."""
        return self.tree.levels[-1].stop * self.size

    def scatter(self, rows: Tensor) -> Tensor:
        """Rows [C, X] of the tokens in their slots [N, size, X]; zeros for padding."""
        before = self.taps - 1
        own = self.inputs.view(-1, before + self.size)[:, before:].reshape(-1)
        slots = rows.index_select(0, own)
        if self.padding is not None:
            slots.masked_fill_(self.padding[:, None], 0)
        return slots.view(-1, self.size, rows.shape[1])

    def collect(self, slots: Tensor) -> Tensor:
        """[N, size, ...] -> [C, ...] of the tokens."""
        return slots.flatten(0, 1).index_select(0, self.slots)
