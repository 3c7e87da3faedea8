"""The sampler's keys and values: rows in banks, each of one capacity.

A running sequence owns one row of the smallest capacity (64, 96, 128, 160 … tokens) that holds it, and moves up when it
outgrows its own; how far ahead it then looks is `room.py`'s. A bank's rows are dense: who leaves is replaced by the
last. So a decoding step is one attention call per bank over plain slices, with no gathering. A bank never grows: its
memory is asked for at once, which a CPU gives only as it is written and a GPU whole, and when it is full there is
another.

Where many sequences go on from one prompt, it has a row of its own, their stem, and theirs hold what they say.

Left out: attention over the rows (`decoding.py`); what is kept after a sequence has ended (`prefixes.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tinsmith.engine.lora import linear
from tinsmith.engine.model.loading import BaseModel
from tinsmith.engine.sampling.capacity import headroom, prefix_capacity, row_capacity
from tinsmith.engine.sampling.prefill import Read

BANK = 8192
"""Tokens of a bank's rows, on a CPU at least, else at most: a call over few rows costs little less than over many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """What one token takes."""

    layers: int
    heads: int
    """Of keys and values."""
    width: int
    dtype: torch.dtype
    device: torch.device


def shape_of(base: BaseModel) -> CacheShape:
    """Of a base model's keys and values."""
    config = base.model.config
    key = next(
        one for one in base.model.modules() if isinstance(one, linear.LoraLinear) and one.name.endswith("k_proj")
    )
    return CacheShape(
        layers=config.num_hidden_layers,
        heads=config.num_key_value_heads,
        width=key.product.shape[0] // config.num_key_value_heads,
        dtype=base.dtype,
        device=base.device,
    )


@dataclass(eq=False, slots=True)
class Row:
    """One sequence's place: `bank.keys[:, row, :, :length]` are its keys."""

    bank: Bank
    row: int
    length: int
    stem: Row | None = None
    """What the sequence begins with and shares with others."""
    readers: int = 0
    """Rows that go on from this one."""

    @property
    def position(self) -> int:
        """Of the next token in its sequence."""
        return (self.stem.length if self.stem else 0) + self.length

    def since(self, first: int) -> tuple[Tensor, Tensor]:
        """A copy of the sequence's keys and values from a position on."""
        if self.stem is None:
            keys, values = (one[:, :, first:] for one in self.content())
            return keys.clone(), values.clone()
        own = max(0, first - self.stem.length)
        parts = zip(self.stem.content(), self.content(), strict=True)
        keys, values = (torch.cat([stem[:, :, first:], mine[:, :, own:]], dim=2) for stem, mine in parts)
        return keys, values

    def content(self) -> tuple[Tensor, Tensor]:
        """Views of its keys and values: [layers, heads, length, width]."""
        return self.bank.keys[:, self.row, :, : self.length], self.bank.values[:, self.row, :, : self.length]


@dataclass(frozen=True, slots=True)
class Kind:
    """What may stand side by side: one capacity, and either stems with about as many readers, or what goes on from
    stems, or whole sequences."""

    capacity: int
    stems: int = 0
    """Binary digits of the number of readers; 0: no stems."""
    goes_on: bool = False


class Bank:
    """Up to `most` rows of one kind; keys and values [layers, most, heads, capacity, width]."""

    def __init__(self, shape: CacheShape, kind: Kind, most: int) -> None:
        self.shape, self.kind, self.most = shape, kind, most
        self.rows: list[Row] = []
        self._left = [kind.capacity] * self.most
        """How many tokens of each row that nobody has may not be 0, from its beginning; in fresh memory all."""
        size = (shape.layers, self.most, shape.heads, kind.capacity, shape.width)
        self.keys, self.values = (torch.empty(size, dtype=shape.dtype, device=shape.device) for _ in range(2))
        self._matrices = list(zip(self.keys.flatten(1, 2), self.values.flatten(1, 2), strict=True))

    @property
    def capacity(self) -> int:
        return self.kind.capacity

    @property
    def full(self) -> bool:
        return len(self.rows) == self.most

    def content(self, layer: int) -> tuple[Tensor, Tensor]:
        """Views of a layer's keys and values, a matrix for each row and head: [rows heads, capacity, width]."""
        matrices = len(self.rows) * self.shape.heads
        keys, values = self._matrices[layer]
        return keys[:matrices], values[:matrices]

    def add(self, length: int) -> Row:
        """A row at the end, whose first `length` tokens the caller writes."""
        row = Row(self, len(self.rows), length)
        self.rows.append(row)
        self._clear(row.row, length, self._left[row.row])
        return row

    def remove(self, row: Row) -> None:
        """Free a row; the last one takes its place."""
        last = self.rows.pop()
        self._left[last.row] = last.length + 1  # with the token of a step that was not finished
        if last is not row:
            for tensor in (self.keys, self.values):
                tensor[:, row.row, :, : last.length] = tensor[:, last.row, :, : last.length]
            self._clear(row.row, last.length, row.length + 1)
            last.row = row.row
            self.rows[row.row] = last

    def _clear(self, row: int, start: int, stop: int) -> None:
        """Behind what a row holds all is 0: it is masked, but a NaN that another has left would reach the sums."""
        for tensor in (self.keys, self.values):
            tensor[:, row, :, start:stop] = 0


class Cache:
    """All banks. `tokens` is what their rows could hold; `foreseen` what they will hold in all."""

    def __init__(self, shape: CacheShape, foreseen: int = 0) -> None:
        self._shape, self._foreseen = shape, foreseen
        self._banks: list[Bank] = []

    @property
    def tokens(self) -> int:
        return sum(bank.capacity * len(bank.rows) for bank in self._banks)

    def insert(self, read: Read, room: int, coming: int = 1) -> Row:
        """A row with the keys and values of a prompt, and room for more; so many of this room are coming now."""
        row = self._add(Kind(row_capacity(max(room, read.length))), read.length, coming)
        read.write(*row.content())
        return row

    def stem(self, read: Read, readers: int) -> Row:
        """A row with the keys and values of a prompt that so many will go on from; it leaves with the last of them."""
        row = self._add(Kind(prefix_capacity(read.length), stems=readers.bit_length()), read.length)
        read.write(*row.content())
        return row

    def open(self, stem: Row, room: int) -> Row:
        """An empty row of a sequence that begins with a stem."""
        return self._behind(stem, self._add(Kind(row_capacity(room), goes_on=True), 0))

    def copy(self, source: Row) -> Row:
        """Another row with the same content."""
        return self._filled(source, source.bank.capacity, 1)

    def ensure(self, row: Row, left: int = 1) -> Row:
        """A row with room for one more token, of `left` that may come: the same, or its content in a larger one."""
        if row.length < row.bank.capacity:
            return row
        # Its neighbours are about as long: they will soon move too.
        larger = self._filled(row, row.length + max(1, headroom(row.length, left)), len(row.bank.rows))
        self.remove(row)
        return larger

    def remove(self, row: Row) -> None:
        """Free a row, and its stem with the last that reads it; an empty bank gives its memory back."""
        row.bank.remove(row)
        self._banks = [bank for bank in self._banks if bank.rows]
        if row.stem is not None:
            row.stem.readers -= 1
            if not row.stem.readers:
                self.remove(row.stem)

    def _add(self, kind: Kind, length: int, coming: int = 1) -> Row:
        same = [bank for bank in self._banks if bank.kind == kind]
        bank = next((bank for bank in same if not bank.full), None)
        if bank is None:
            bank = Bank(self._shape, kind, self._most(kind, max(coming, sum(len(bank.rows) for bank in same))))
            self._banks.append(bank)
        return bank.add(length)

    def _most(self, kind: Kind, wanted: int) -> int:
        """Rows of a new bank. Where memory that nobody writes costs nothing, as many as are foreseen; else as many as
        are coming or are there already: few banks in the end, and little more memory than the rows have."""
        if self._shape.device.type == "cpu":
            return max(1, max(BANK, self._foreseen // 2) // kind.capacity)
        return max(1, min(wanted, BANK // kind.capacity))

    def _behind(self, stem: Row, row: Row) -> Row:
        row.stem = stem
        stem.readers += 1
        return row

    def _filled(self, source: Row, room: int, coming: int) -> Row:
        row = self._add(replace(source.bank.kind, capacity=row_capacity(room)), source.length, coming)
        if source.stem is not None:
            self._behind(source.stem, row)
        for into, content in zip(row.content(), source.content(), strict=True):
            into.copy_(content)
        return row
