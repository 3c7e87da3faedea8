"""KV cache of running sequences: rows in banks, where all rows of a bank have one capacity.

A running sequence owns one row of the smallest capacity (64, 96, 128, 160 … tokens) that holds it, and moves to a
larger row when it outgrows its own; `capacity.headroom` says how much larger. The rows of a bank are dense: when one is
removed, the last one takes its place. So a decoding step is one attention call per bank over plain slices, without
gathering. A bank never grows, because its memory is allocated at once (a CPU commits it page by page as it is written,
a GPU completely); when a bank is full, another one is made.

Where many sequences continue one prompt, the prompt has a row of its own, their shared prefix, and their rows hold only
their own tokens.

Attention over the rows is in `decode`; keys and values of ended sequences are in `prefixes.cache`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine.model import attention, packing
from tinsmith.engine.model.base_model import BaseModel
from tinsmith.engine.model.hybrid.states import RecurrentState, hybrid_context
from tinsmith.engine.sampling.capacity import headroom, prefix_capacity, row_capacity
from tinsmith.engine.sampling.prefill import PrefilledPrompt
from tinsmith.engine.sampling.state_bank import StateBank, StateRow
from tinsmith.errors import Unsupported

BANK_TOKENS = 8192
"""Tokens of a bank: at least on a CPU, at most elsewhere. A call over few rows costs little less than over many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """Shape, type and device of one token's keys and values."""

    layers: int
    """Attention layers."""
    heads: int
    """Key and value heads."""
    key_width: int
    value_width: int
    """0 for latents, whose first columns are the values."""
    latent_width: int = 0
    """How many columns; 0 where values are stored."""
    dtype: torch.dtype
    device: torch.device

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values."""
        return self.layers * self.heads * (self.key_width + self.value_width) * self.dtype.itemsize


def state_bank(base: BaseModel, cache_tokens: int) -> StateBank | None:
    """An empty bank for the states of a model's recurrent layers; None for a model without any."""
    if base.recurrent is None:
        return None
    row_tokens = -(-base.recurrent.bytes(base.dtype) // cache_shape(base).token_bytes)
    return StateBank(base.recurrent, base.dtype, base.device, row_tokens, cache_tokens // row_tokens)


@torch.no_grad()
def cache_shape(base: BaseModel) -> CacheShape:
    """The shape of a base model's keys and values, as a pass over one token gives them.

    Raises Unsupported if layers differ.
    """
    tree = packing.pack([packing.PackedRow(key=0, adapter=0, tokens=np.zeros(1, np.int32))])
    context = attention.PackedAttention(tree, base.dtype, base.device, save_kv=True)
    tokens, positions = (torch.as_tensor(numbers, device=base.device) for numbers in (tree.tokens, tree.positions))
    in_model = hybrid_context(base.recurrent, tree, context, base.device) if base.recurrent else context
    base.hidden(tokens, positions, in_model)
    shapes = {(keys.shape[1], keys.shape[3], values.shape[3]) for keys, values in context.saved_kv}
    if len(shapes) != 1:
        raise Unsupported(
            f"The layers of {base.card.source} differ in their keys and values: {sorted(shapes)}.",
            "Serve a model whose layers have as many key heads, of the same width.",
        )
    ((heads, key_width, value_width),) = shapes
    return CacheShape(
        layers=len(context.saved_kv),
        heads=heads,
        key_width=key_width,
        value_width=value_width,
        latent_width=0 if value_width else base.latent_width,
        dtype=base.dtype,
        device=base.device,
    )


@dataclass(eq=False, slots=True)
class CacheRow:
    """The row of one sequence, or of a shared prefix: `bank.keys[:, index, :, :length]` are its keys."""

    bank: Bank
    index: int
    length: int
    shared_prefix: CacheRow | None = None
    """The row of the prompt, where sequences share it."""
    readers: int = 0
    """Number of rows that have this one as their shared prefix."""
    state: StateRow | None = None
    """The sequence's states, in a model with recurrent layers."""

    @property
    def capacity(self) -> int:
        """Tokens for which the row has space."""
        return self.bank.capacity

    @property
    def position(self) -> int:
        """Position of the sequence's next token."""
        return (self.shared_prefix.length if self.shared_prefix else 0) + self.length

    def copy_from(self, first: int) -> tuple[Tensor, Tensor]:
        """Copies of the sequence's keys and values from position `first` on, with those of the shared prefix."""
        if self.shared_prefix is None:
            keys, values = (tensor[:, :, first:] for tensor in self.content())
            return keys.clone(), values.clone()
        own_first = max(0, first - self.shared_prefix.length)
        parts = zip(self.shared_prefix.content(), self.content(), strict=True)
        keys, values = (torch.cat([prefix[:, :, first:], own[:, :, own_first:]], dim=2) for prefix, own in parts)
        return keys, values

    def content(self) -> tuple[Tensor, Tensor]:
        """Views of the row's keys and values [layers, heads, length, width]."""
        return self.bank.keys[:, self.index, :, : self.length], self.bank.values[:, self.index, :, : self.length]


@dataclass(frozen=True, slots=True)
class RowKind:
    """Rows that share a bank: of one capacity, and either shared prefixes with about as many readers, or rows with a
    shared prefix, or whole sequences."""

    capacity: int
    reader_bits: int = 0
    """Bit length of the number of readers; 0: not a shared prefix."""
    has_prefix: bool = False


class Bank:
    """Up to `max_rows` rows of one kind; keys and values are [layers, max_rows, heads, capacity, width]."""

    def __init__(self, shape: CacheShape, kind: RowKind, max_rows: int) -> None:
        self.shape, self.kind, self.max_rows = shape, kind, max_rows
        self.rows: list[CacheRow] = []
        self._dirty = [kind.capacity] * max_rows
        """For each free row: how many tokens from its beginning may not be 0; in newly allocated memory all."""
        size = (shape.layers, max_rows, shape.heads, kind.capacity)
        self.keys, self.values = (
            torch.empty(*size, width, dtype=shape.dtype, device=shape.device)
            for width in (shape.key_width, shape.value_width)
        )
        self._layers = list(zip(self.keys.flatten(1, 2), self.values.flatten(1, 2), strict=True))

    @property
    def capacity(self) -> int:
        return self.kind.capacity

    @property
    def full(self) -> bool:
        return len(self.rows) == self.max_rows

    def content(self, layer: int) -> tuple[Tensor, Tensor]:
        """Views of a layer's keys and values, one matrix for each row and head: [rows heads, capacity, width]."""
        matrices = len(self.rows) * self.shape.heads
        keys, values = (tensor[:matrices] for tensor in self._layers[layer])
        return keys, keys[..., : self.shape.latent_width] if self.shape.latent_width else values

    def add(self, length: int) -> CacheRow:
        """Append a row, of which the caller writes the first `length` tokens."""
        row = CacheRow(self, len(self.rows), length)
        self.rows.append(row)
        self._clear(row.index, length, self._dirty[row.index])
        return row

    def remove(self, row: CacheRow) -> None:
        """Free a row; the last row takes its place."""
        last = self.rows.pop()
        self._dirty[last.index] = last.length + 1  # an unfinished step may have written one more token
        if last is not row:
            for tensor in (self.keys, self.values):
                tensor[:, row.index, :, : last.length] = tensor[:, last.index, :, : last.length]
            self._clear(row.index, last.length, row.length + 1)
            last.index = row.index
            self.rows[row.index] = last

    def _clear(self, index: int, start: int, stop: int) -> None:
        """Zero the tokens after a row's length. They are masked, but a NaN from an earlier row would reach the sums."""
        for tensor in (self.keys, self.values):
            tensor[:, index, :, start:stop] = 0


class RowCache(Protocol):
    """The rows of running sequences, in banks or in pages; a row is one of its own."""

    @property
    def states(self) -> StateBank | None: ...

    @property
    def tokens(self) -> int:
        """What the rows take."""
        ...

    @property
    def allocated_tokens(self) -> int:
        """What there is memory for."""
        ...

    def insert(self, prompt: PrefilledPrompt, min_capacity: int, arriving: int = 1) -> Any: ...

    def copy(self, source: Any) -> Any: ...

    def ensure_space(self, row: Any, remaining: int = 1) -> Any: ...

    def start_state(self, row: Any, state: RecurrentState | None) -> None: ...

    def state_of(self, row: Any) -> RecurrentState | None: ...

    def remove(self, row: Any) -> None: ...


class KVCache:
    """All banks. `tokens` is the capacity of their rows; `expected_tokens` what they will grow to in all."""

    def __init__(self, shape: CacheShape, expected_tokens: int = 0, states: StateBank | None = None) -> None:
        self.shape, self._expected_tokens, self.states = shape, expected_tokens, states
        self._banks: list[Bank] = []

    @property
    def tokens(self) -> int:
        states = len(self.states.rows) * self.states.row_tokens if self.states else 0
        return states + sum(bank.capacity * len(bank.rows) for bank in self._banks)

    @property
    def allocated_tokens(self) -> int:
        """Tokens that there is memory for, on a CPU only where they are written."""
        return self.tokens

    def insert(self, prompt: PrefilledPrompt, min_capacity: int, arriving: int = 1) -> CacheRow:
        """A row with a prompt's keys and values. `arriving`: rows of this capacity that are being inserted now."""
        row = self._add(RowKind(row_capacity(max(min_capacity, prompt.length))), prompt.length, arriving)
        prompt.write(*row.content())
        return row

    def insert_shared_prefix(self, prompt: PrefilledPrompt, readers: int) -> CacheRow:
        """A row with the keys and values of a prompt that `readers` sequences continue; removed with the last of
        them."""
        kind = RowKind(prefix_capacity(prompt.length), reader_bits=readers.bit_length())
        row = self._add(kind, prompt.length)
        prompt.write(*row.content())
        return row

    def insert_after(
        self, shared_prefix: CacheRow, min_capacity: int, prompt: PrefilledPrompt | None = None
    ) -> CacheRow:
        """A row of a sequence that continues a shared prefix: empty, or with what `prompt` has after the prefix."""
        length = 0 if prompt is None else prompt.length - shared_prefix.length
        row = self._add(RowKind(row_capacity(max(min_capacity, length)), has_prefix=True), length)
        if prompt is not None:
            prompt.write(*row.content(), first=shared_prefix.length)
        return self._link(shared_prefix, row)

    def copy(self, source: CacheRow) -> CacheRow:
        """Another row with the same content."""
        return self._copy(source, source.bank.capacity, 1)

    def start_state(self, row: CacheRow, state: RecurrentState | None) -> None:
        """Let a new row's sequence start from the states at the end of its prompt, if the model has states."""
        if self.states is not None:
            assert state is not None
            row.state = self.states.add(state)

    def state_of(self, row: CacheRow) -> RecurrentState | None:
        """A copy of a sequence's states now, if the model has states."""
        return self.states.copy(row.state) if self.states is not None and row.state is not None else None

    def ensure_space(self, row: CacheRow, remaining: int = 1) -> CacheRow:
        """A row with space for one more token, of `remaining` that may follow: `row`, or a larger copy of it."""
        if row.length < row.bank.capacity:
            return row
        # The rows of the bank are about as long and will soon move too.
        larger = self._copy(row, row.length + max(1, headroom(row.length, remaining)), len(row.bank.rows))
        larger.state, row.state = row.state, None
        self.remove(row)
        return larger

    def remove(self, row: CacheRow) -> None:
        """Free a row with its states, and its shared prefix with the last reader; an empty bank is freed too."""
        if self.states is not None and row.state is not None:
            self.states.remove(row.state)
            row.state = None
        row.bank.remove(row)
        self._banks = [bank for bank in self._banks if bank.rows]
        if row.shared_prefix is not None:
            row.shared_prefix.readers -= 1
            if not row.shared_prefix.readers:
                self.remove(row.shared_prefix)

    def _add(self, kind: RowKind, length: int, arriving: int = 1) -> CacheRow:
        same = [bank for bank in self._banks if bank.kind == kind]
        bank = next((bank for bank in same if not bank.full), None)
        if bank is None:
            bank = Bank(self.shape, kind, self._bank_rows(kind, max(arriving, sum(len(bank.rows) for bank in same))))
            self._banks.append(bank)
        return bank.add(length)

    def _bank_rows(self, kind: RowKind, wanted: int) -> int:
        """Number of rows of a new bank: on a CPU, where unwritten memory is free, as many as are expected; elsewhere as
        many as arrive or exist already, which keeps banks few and their memory close to that of their rows."""
        if self.shape.device.type == "cpu":
            return max(1, max(BANK_TOKENS, self._expected_tokens // 2) // kind.capacity)
        return max(1, min(wanted, BANK_TOKENS // kind.capacity))

    def _link(self, shared_prefix: CacheRow, row: CacheRow) -> CacheRow:
        row.shared_prefix = shared_prefix
        shared_prefix.readers += 1
        return row

    def _copy(self, source: CacheRow, min_capacity: int, arriving: int) -> CacheRow:
        kind = replace(source.bank.kind, capacity=row_capacity(min_capacity))
        row = self._add(kind, source.length, arriving)
        if source.shared_prefix is not None:
            self._link(source.shared_prefix, row)
        for target, content in zip(row.content(), source.content(), strict=True):
            target.copy_(content)
        return row
