"""A base model that runs through transformers' own modules: any architecture, padded rows, no speed promises.

The packed tree of a pass is unpacked: rows that end at different tokens are computed as right-padded rows with an
attention mask and explicit positions, in sub-passes of similar length, and the hidden states are gathered back to
their packed positions. Padding comes after a row's tokens, so no state and no attention of the row ever sees it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from tinsmith.engine.images.tower import VisualInputs
from tinsmith.engine.lora.adapter import AdapterWeights, PlacedAdapter
from tinsmith.engine.lora.linear import ActiveAdapters
from tinsmith.engine.model import attention, packing
from tinsmith.engine.model.base_model import BaseModel
from tinsmith.errors import EngineError

PADDED_TOKENS = 2048
"""Tokens of a sub-pass, padding included. A pass of several sub-passes recomputes each in its backward."""


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of a pass, and the packed positions whose hidden states are taken from it."""

    tokens: np.ndarray
    weights: AdapterWeights | None
    at: np.ndarray
    """int64: packed positions."""
    steps: np.ndarray
    """int64: their positions in the row."""


@dataclass(frozen=True, slots=True)
class _SubPass:
    """Rows of similar length, padded on the right."""

    tokens: Tensor
    """int64 [R, L]."""
    mask: Tensor
    """int64 [R, L]: 1 for tokens, 0 for padding."""
    placed: tuple[PlacedAdapter, ...]
    """Adapters by positions of the flattened rows."""
    take: Tensor
    """int64: flattened positions of the hidden states to keep."""
    at: Tensor
    """int64: their packed positions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneralModel(BaseModel):
    """A base model whose forward is transformers' own."""

    joins: bool = True
    """Whether rows of different lengths decode in one batch; found at load."""
    adapters: list[ActiveAdapters] = field(default_factory=list)
    """Which adapter serves which positions; empty until the base is adapted."""

    @property
    @override
    def cuts_trees(self) -> bool:
        return False  # its rows are padded

    @property
    @override
    def computes_in_threads(self) -> bool:
        return False  # a pass adds a hook to the embedding

    @override
    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        context: attention.AttentionContext,
        visual: VisualInputs | None = None,
    ) -> Tensor:
        raise EngineError("A base model of the general path has no packed attention: use hidden_of.")

    @override
    def hidden_of(
        self,
        tree: packing.PackedTree,
        dtype: torch.dtype | None = None,
        context: attention.AttentionContext | None = None,
    ) -> Tensor:
        assert context is None, "padded rows have attention of their own"
        passes = list(_sub_passes(tree, self.placed, self.device))
        pieces = []
        for sub_pass in passes:
            if torch.is_grad_enabled() and len(passes) > 1:
                leaf = torch.zeros((), device=self.device, requires_grad=True)
                pieces.append(_Recomputed.apply(leaf, self, sub_pass))
            else:
                pieces.append(self._taken(sub_pass))
        at = torch.cat([sub_pass.at for sub_pass in passes])
        hidden: Tensor = torch.cat(pieces)
        return hidden[at.argsort()]

    def rows(self, tokens: Tensor, **settings: Any) -> Any:
        """transformers' output for padded rows int64 [R, L]; the graph, if there is one, starts after the embedding."""
        with _detached_embeddings(self.model):
            return self.body(input_ids=tokens, **settings)

    @contextmanager
    def serving(self, placed: Sequence[PlacedAdapter]) -> Iterator[None]:
        """Serve these adapters, placed by flattened positions, and afterwards those that were served before."""
        if not self.adapters:
            yield
            return
        previous = self.placed
        with self.adapters[0].using(placed):
            yield
        self.adapters[0].resume(previous)

    @property
    def placed(self) -> tuple[PlacedAdapter, ...]:
        """The adapters that are served now, by positions of the flattened rows of the current sub-pass."""
        return self.adapters[0].placed if self.adapters else ()

    def _taken(self, sub_pass: _SubPass) -> Tensor:
        """The hidden states [K, D] to keep of a sub-pass."""
        positions = torch.arange(sub_pass.tokens.shape[1], device=self.device).expand_as(sub_pass.tokens)
        with self.serving(sub_pass.placed):
            output = self.rows(
                sub_pass.tokens, attention_mask=sub_pass.mask, position_ids=positions, use_cache=False
            ).last_hidden_state
        return output.flatten(0, 1)[sub_pass.take]


class _Recomputed(torch.autograd.Function):
    """A sub-pass whose activations are computed again in the backward, so that one sub-pass at a time is in memory."""

    @staticmethod
    @override
    def forward(ctx: Any, leaf: Tensor, base: GeneralModel, sub_pass: _SubPass) -> Tensor:
        ctx.base, ctx.sub_pass = base, sub_pass
        with torch.no_grad():
            return base._taken(sub_pass)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        with torch.enable_grad():
            hidden = ctx.base._taken(ctx.sub_pass)
        hidden.backward(grads[0])
        return None, None, None


@contextmanager
def _detached_embeddings(model: nn.Module) -> Iterator[None]:
    """Start the autograd graph at the embedding's output, if gradients are enabled.

    Adapters compute their gradients by hand: the graph needs another leaf. Token ids stay the model's input, because
    some models read them again. The clone may be changed in place, a leaf may not.
    """

    def detach(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        return output.detach().requires_grad_().clone() if torch.is_grad_enabled() else output

    hook = model.get_input_embeddings().register_forward_hook(detach)  # type: ignore[operator]
    try:
        yield
    finally:
        hook.remove()


def _sub_passes(tree: packing.PackedTree, placed: Sequence[PlacedAdapter], device: torch.device) -> Iterator[_SubPass]:
    """Rows of the tree from the longest to the shortest, so that little is padded."""
    pending: list[_Row] = []
    for row in _rows(tree, placed):
        if pending and len(pending[0].tokens) * (len(pending) + 1) > PADDED_TOKENS:
            yield _padded(pending, device)
            pending = []
        pending.append(row)
    if pending:
        yield _padded(pending, device)


def _rows(tree: packing.PackedTree, placed: Sequence[PlacedAdapter]) -> Iterator[_Row]:
    """The tree's rows, the longest first, without those that are prefixes of others."""
    taken = np.zeros(len(tree.tokens), bool)
    for index in sorted(tree.index.values(), key=len, reverse=True):
        new = ~taken[index]
        if not new.any():
            continue
        taken[index] = True
        at = index[new]
        weights = next((weights for weights, start, stop in placed if start <= at[0] < stop), None)
        yield _Row(tree.tokens[index], weights, at, np.flatnonzero(new))


def _padded(rows: Sequence[_Row], device: torch.device) -> _SubPass:
    """Rows as one batch, those of an adapter side by side."""
    rows = sorted(rows, key=lambda row: id(row.weights))
    longest = max(len(row.tokens) for row in rows)
    tokens, mask = np.zeros((len(rows), longest), np.int64), np.zeros((len(rows), longest), np.int64)
    for number, row in enumerate(rows):
        tokens[number, : len(row.tokens)] = row.tokens
        mask[number, : len(row.tokens)] = 1
    take = np.concatenate([number * longest + row.steps for number, row in enumerate(rows)])
    at = np.concatenate([row.at for row in rows])
    return _SubPass(
        torch.as_tensor(tokens, device=device),
        torch.as_tensor(mask, device=device),
        tuple(place_rows([row.weights for row in rows], longest)),
        torch.as_tensor(take, device=device),
        torch.as_tensor(at, device=device),
    )


def place_rows(weights: Sequence[AdapterWeights | None], length: int) -> Iterator[PlacedAdapter]:
    """Adapters of rows of one length, by flattened positions; neighbours with one adapter together."""
    start = 0
    for number, adapter in enumerate(weights):
        if number + 1 < len(weights) and weights[number + 1] is adapter:
            continue
        if adapter is not None:
            yield adapter, start * length, (number + 1) * length
        start = number + 1
