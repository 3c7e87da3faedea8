"""States of the recurrent layers of running sequences: one row for each sequence, beside its row in the KV cache.

The rows are dense, so a decoding step updates all of them in place, in their order here; the step's tokens, which come
in another order, are few and small. A state is copied when a sequence starts and when it ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tinsmith.engine.model.hybrid.convolution import convolve
from tinsmith.engine.model.hybrid.delta_rule import delta_step
from tinsmith.engine.model.hybrid.states import MixerInputs, RecurrentShape, RecurrentState

MIN_ROWS = 8
"""Rows of the first allocation."""


@dataclass(eq=False, slots=True)
class StateRow:
    """The states of one sequence: number `index` in each layer of the bank."""

    index: int


class StateBank:
    """The states of all running sequences; `row_tokens` is how many cached tokens one row's states are worth."""

    def __init__(
        self, shape: RecurrentShape, dtype: torch.dtype, device: torch.device, row_tokens: int, max_rows: int
    ) -> None:
        """`max_rows`: rows that fit into the cache's memory. A job that is too large for it has more."""
        self.row_tokens, self._max_rows = row_tokens, max_rows
        self.rows: list[StateRow] = []
        self._shape, self._dtype, self._device = shape, dtype, device
        self.recurrent: list[Tensor] = []
        """float32 [rows allocated, Hv, dk, dv] of each layer."""
        self.conv: list[Tensor] = []
        """[rows allocated, taps - 1, channels] of each layer."""
        self._allocate(0)

    def add(self, state: RecurrentState) -> StateRow:
        """A row with a copy of `state`."""
        row = StateRow(len(self.rows))
        if row.index == len(self.recurrent[0]):
            self._allocate(self._grown(row.index))
        self.rows.append(row)
        for layer, (recurrent, conv) in enumerate(zip(self.recurrent, self.conv, strict=True)):
            recurrent[row.index] = state.recurrent[layer]
            conv[row.index] = state.conv[layer]
        return row

    def remove(self, row: StateRow) -> None:
        """Free a row; the last row takes its place. Memory is freed with the last row."""
        last = self.rows.pop()
        if last is not row:
            for tensor in (*self.recurrent, *self.conv):
                tensor[row.index] = tensor[last.index]
            last.index = row.index
            self.rows[row.index] = last
        if not self.rows:
            self._allocate(0)

    def copy(self, row: StateRow) -> RecurrentState:
        """A copy of a row's states."""
        return RecurrentState(
            torch.stack([recurrent[row.index] for recurrent in self.recurrent]),
            torch.stack([conv[row.index] for conv in self.conv]),
        )

    def _grown(self, rows: int) -> int:
        """Rows to allocate when `rows` are full: at most as many as fit into the cache, unless those are full."""
        if rows >= self._max_rows:
            return rows + max(1, rows // MIN_ROWS)
        return min(max(MIN_ROWS, 2 * rows), self._max_rows)

    def _allocate(self, rows: int) -> None:
        """Make space for `rows` rows, layer by layer, so that only one layer is in memory twice."""
        layers = range(len(self._shape.recurrent_layers))
        shapes = ((self.recurrent, self._shape.state, torch.float32), (self.conv, self._shape.conv, self._dtype))
        for tensors, shape, dtype in shapes:
            tensors.extend(torch.empty(0, *shape, dtype=dtype, device=self._device) for _ in layers[len(tensors) :])
            for layer in layers:
                larger = torch.empty(rows, *shape, dtype=dtype, device=self._device)
                larger[: len(self.rows)] = tensors[layer][: len(self.rows)]
                tensors[layer] = larger


class DecodeStates:
    """Recurrent layers of a decoding step, in which token b belongs to `rows[b]`: all rows of the bank."""

    def __init__(self, bank: StateBank, rows: Sequence[StateRow]) -> None:
        self._bank, count = bank, len(rows)
        indices = [row.index for row in rows]
        in_order = indices == list(range(count))
        device = bank.recurrent[0].device
        self._row_of = None if in_order else torch.tensor(indices, device=device)
        """int64 [B]: the row of each token; None if tokens and rows are in the same order."""
        self._token_of = None if self._row_of is None else torch.argsort(self._row_of)
        taps = bank.conv[0].shape[1]
        # The table of a convolution: the new tokens, then the inputs that each row keeps, newest last.
        previous = count + torch.arange(count * taps, device=device).view(count, taps).flip(1)
        self._ancestors = torch.cat([torch.arange(count, device=device)[:, None], previous], 1)

    def mix(self, layer: int, inputs: MixerInputs) -> Tensor:
        """As `RecurrentContext.mix`; advances the states of `layer` by one token."""
        if self._token_of is not None:
            parts = {name: getattr(inputs, name)[self._token_of] for name in ("mixed", "decay", "beta")}
            inputs = replace(inputs, **parts)
        count = len(inputs.mixed)
        previous, state = self._bank.conv[layer][:count], self._bank.recurrent[layer][:count]
        table = torch.cat([inputs.mixed, previous.flatten(0, 1)])
        query, key, value = inputs.heads(convolve(table, self._ancestors, inputs.conv_weight))
        output = delta_step(query, key, value, inputs.decay, inputs.beta, state)
        previous.copy_(torch.cat([previous[:, 1:], inputs.mixed[:, None]], 1))
        return output if self._row_of is None else output[self._row_of]
