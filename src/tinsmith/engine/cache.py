"""The sampler's keys and values: rows in banks, each of one capacity.

A running sequence owns one row of the smallest capacity (64, 96, 128, 160 … tokens) that holds it, and moves up when it
outgrows its own, so at most a third of a row is idle and copying is paid a few times in a long life. A bank's rows are
dense: who leaves is replaced by the last. So a decoding step is one attention call per bank over plain slices, with no
gathering. A bank never grows: its memory is asked for at once, which a CPU gives only as it is written, and when it is
full there is another.

Left out: what is kept after a sequence has ended (`prefixes.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tinsmith.engine.attention import additive, attend_once
from tinsmith.engine.prefixes import Stretch
from tinsmith.engine.room import capacity

BANK = 8192
"""Tokens of a bank's rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """What one token takes."""

    layers: int
    heads: int
    """Of keys and values."""
    width: int
    dtype: torch.dtype
    device: torch.device


@dataclass(eq=False, slots=True)
class Row:
    """One sequence's place: `bank.keys[:, row, :, :length]` are its keys."""

    bank: Bank
    row: int
    length: int

    def content(self) -> tuple[Tensor, Tensor]:
        """Views of its keys and values: [layers, heads, length, width]."""
        return self.bank.keys[:, self.row, :, : self.length], self.bank.values[:, self.row, :, : self.length]


class Bank:
    """Up to `most` rows of one capacity; keys and values [layers, most, heads, capacity, width]."""

    def __init__(self, shape: CacheShape, capacity: int) -> None:
        self.shape, self.capacity, self.most = shape, capacity, max(1, BANK // capacity)
        self.rows: list[Row] = []
        self._written = 0
        """Rows that ever held something."""
        size = (shape.layers, self.most, shape.heads, capacity, shape.width)
        self.keys, self.values = (torch.empty(size, dtype=shape.dtype, device=shape.device) for _ in range(2))

    @property
    def full(self) -> bool:
        return len(self.rows) == self.most

    def add(self, length: int) -> Row:
        """A row at the end, whose first `length` tokens the caller writes."""
        row = Row(self, len(self.rows), length)
        self.rows.append(row)
        if row.row == self._written:
            self._written += 1
            for tensor in (self.keys, self.values):  # what is unwritten is masked, but a NaN would still reach the sums
                tensor[:, row.row, :, length:] = 0
        return row

    def remove(self, row: Row) -> None:
        """Free a row; the last one takes its place."""
        last = self.rows.pop()
        if last is not row:
            for tensor in (self.keys, self.values):
                tensor[:, row.row, :, : last.length] = tensor[:, last.row, :, : last.length]
            last.row = row.row
            self.rows[row.row] = last


class Cache:
    """All banks. `tokens` is what their rows could hold."""

    def __init__(self, shape: CacheShape) -> None:
        self._shape = shape
        self._banks: list[Bank] = []

    @property
    def tokens(self) -> int:
        return sum(bank.capacity * len(bank.rows) for bank in self._banks)

    def insert(self, content: Sequence[Stretch], kept: Sequence[tuple[Tensor, Tensor]], room: int) -> Row:
        """A row filled from runs and from what was kept of a pass ([1, heads, C, width] of each layer)."""
        length = sum(one.stop - one.start for one in content)
        row, at = self._add(max(room, length), length), 0
        keys, values = row.content()
        for one in content:
            into = slice(at, at + one.stop - one.start)
            if one.run is not None:
                keys[:, :, into] = one.run.keys[:, :, one.start : one.stop]
                values[:, :, into] = one.run.values[:, :, one.start : one.stop]
            else:
                for layer, passed in enumerate(kept):
                    keys[layer, :, into], values[layer, :, into] = one.of(layer, *passed)
            at = into.stop
        return row

    def copy(self, source: Row) -> Row:
        """Another row with the same content."""
        return self._filled(source, source.bank.capacity)

    def ensure(self, row: Row) -> Row:
        """A row with room for one more token: the same, or its content in a larger one."""
        if row.length < row.bank.capacity:
            return row
        larger = self._filled(row, row.length + 1)
        self.remove(row)
        return larger

    def remove(self, row: Row) -> None:
        """Free a row; an empty bank gives its memory back."""
        row.bank.remove(row)
        self._banks = [bank for bank in self._banks if bank.rows]

    def _add(self, room: int, length: int) -> Row:
        wanted = capacity(room)
        bank = next((bank for bank in self._banks if bank.capacity == wanted and not bank.full), None)
        if bank is None:
            bank = Bank(self._shape, wanted)
            self._banks.append(bank)
        return bank.add(length)

    def _filled(self, source: Row, room: int) -> Row:
        row = self._add(room, source.length)
        for into, content in zip(row.content(), source.content(), strict=True):
            into.copy_(content)
        return row


@dataclass(frozen=True, slots=True)
class _Slice:
    """One bank's part in a step: which of the step's tokens are its rows', and what each may see."""

    bank: Bank
    tokens: Tensor
    """int64 [rows of the bank]: place in the step of row 0, 1, …"""
    at: Tensor
    """int64 [rows]: where each row's new token goes."""
    mask: Tensor
    """Additive [rows, 1, 1, capacity]."""


@dataclass(slots=True)
class Cached:
    """The attention context of a decoding step: token b of the step belongs to `rows[b]`, which has room for it."""

    rows: Sequence[Row]
    _slices: list[_Slice] = field(default_factory=list)

    def __post_init__(self) -> None:
        places = {id(row): place for place, row in enumerate(self.rows)}
        for bank in {id(row.bank): row.bank for row in self.rows}.values():
            device = bank.shape.device
            tokens = torch.tensor([places[id(row)] for row in bank.rows], device=device)
            at = torch.tensor([row.length for row in bank.rows], device=device)
            seen = torch.arange(bank.capacity, device=device)[None] <= at[:, None]
            mask = additive(seen, bank.shape.dtype, device)
            self._slices.append(_Slice(bank, tokens, at, mask[:, None, None]))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """query [1, Hq, B, D], key and value [1, Hkv, B, D] -> [1, B, Hq, D]."""
        output = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format)
        for part in self._slices:
            count = len(part.tokens)
            order = torch.arange(count, device=query.device)
            keys, values = part.bank.keys[layer], part.bank.values[layer]
            keys[order, :, part.at] = key[0, :, part.tokens].transpose(0, 1)
            values[order, :, part.at] = value[0, :, part.tokens].transpose(0, 1)
            # Query heads that share a key head stand as rows of one small matrix: [rows, Hkv, Hq / Hkv, D].
            queries = query[0, :, part.tokens].transpose(0, 1).unflatten(1, (keys.shape[1], -1))
            found = _attended(queries, keys[:count], values[:count], part.mask, scale)
            output[0, part.tokens] = found.flatten(1, 2)
        return output

    def advance(self) -> None:
        """After the pass: every row is one token longer."""
        for row in self.rows:
            row.length += 1


def _attended(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """query [R, Hkv, G, D], key and value [R, Hkv, L, D] -> [R, Hkv, G, D].

    Written out: with one new token to a row, the CPU's flash kernel takes more than twice as long. Rows are read up to
    their capacity, since a product over a part of each would first copy it.
    """
    if query.device.type != "cpu":
        return attend_once(query, key, value, mask.expand(-1, 1, query.shape[2], -1), scale)
    scores = torch.matmul(query, key.transpose(2, 3)).mul_(scale).add_(mask)
    return torch.matmul(scores.softmax(dim=-1), value)
