"""Attention of a decoding step: one new token of every running sequence, each over its own row of the cache.

A bank's rows are one call. What several sequences begin with is a row of its own, a stem, whose keys are read once for
all of them, their queries side by side; one softmax then goes over a sequence's stem and its row together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tinsmith.engine.attention import additive, attend_once
from tinsmith.engine.cache import Bank, Row


@dataclass(frozen=True, slots=True)
class _Stems:
    """A bank of S stems as the rows of another bank read them, up to M of these each."""

    bank: Bank
    readers: Tensor
    """int64 [S M]: which row reads it as which of its readers; where there is none, any."""
    places: Tensor
    """int64 [rows]: where each stands in `readers`; for a row that reads none of these, any."""
    reads: Tensor | None
    """[rows, 1, 1, 1]: 1 where a row reads one of these, else 0; None if all do."""
    seen: Tensor
    """bool [rows, capacity]."""

    @property
    def most(self) -> int:
        return len(self.readers) // len(self.bank.rows)

    def scores(self, layer: int, queries: Tensor) -> Tensor:
        """queries [rows, Hkv, G, D] -> [rows, Hkv, G, capacity]; of no meaning where `seen` is false."""
        found = torch.matmul(self._by_stem(queries), self.bank.keys[layer, : len(self.bank.rows)].mT)
        return self._by_row(found, queries.shape[2])

    def values(self, layer: int, chances: Tensor) -> Tensor:
        """chances [rows, Hkv, G, capacity] -> their sums of the values [rows, Hkv, G, D]; 0 for who reads none."""
        found = torch.matmul(self._by_stem(chances), self.bank.values[layer, : len(self.bank.rows)])
        rows = self._by_row(found, chances.shape[2])
        return rows if self.reads is None else rows * self.reads

    def _by_stem(self, rows: Tensor) -> Tensor:
        """[rows, Hkv, G, X] -> [S, Hkv, M G, X]."""
        taken = rows.index_select(0, self.readers).unflatten(0, (-1, self.most))
        return taken.transpose(1, 2).flatten(2, 3)

    def _by_row(self, found: Tensor, group: int) -> Tensor:
        """[S, Hkv, M G, X] -> [rows, Hkv, G, X]."""
        apart = found.unflatten(2, (self.most, group)).transpose(1, 2).flatten(0, 1)
        return apart.index_select(0, self.places)


@dataclass(frozen=True, slots=True)
class _Slice:
    """One bank's part in a step: which of the step's tokens are its rows', and what each may see."""

    bank: Bank
    tokens: Tensor
    """int64 [rows of the bank]: place in the step of row 0, 1, …"""
    at: Tensor
    """int64 [rows Hkv]: where each row's new token goes, among all places of a layer in the bank."""
    mask: Tensor
    """Additive [rows, 1, 1, capacity and that of the stems]."""
    stems: tuple[_Stems, ...]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """query [B, Hq, D], key and value [B, Hkv, D] -> [rows, Hq, D]."""
        banks = self.bank.keys[layer], self.bank.values[layer]
        for bank, new in zip(banks, (key, value), strict=True):
            bank.view(-1, bank.shape[-1]).index_copy_(0, self.at, new.index_select(0, self.tokens).flatten(0, 1))
        # Query heads that share a key head stand as rows of one small matrix: [rows, Hkv, Hq / Hkv, D].
        queries = query.index_select(0, self.tokens).unflatten(1, (key.shape[1], -1))
        keys, values = (bank[: len(self.tokens)] for bank in banks)
        if query.device.type != "cpu":
            return attend_once(queries, keys, values, self.mask.expand(-1, 1, queries.shape[2], -1), scale).flatten(
                1, 2
            )
        return self._weighed(layer, queries * scale, keys, values).flatten(1, 2)

    def _weighed(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Written out: with one new token to a row, the CPU's flash kernel takes more than twice as long. Rows are read
        up to their capacity, since a product over a part of each would first copy it."""
        scores = torch.matmul(queries, keys.mT)
        if not self.stems:
            return torch.matmul(scores.add_(self.mask).softmax(dim=-1), values)
        every = torch.cat([scores, *(one.scores(layer, queries) for one in self.stems)], dim=-1)
        widths = [self.bank.capacity, *(one.bank.capacity for one in self.stems)]
        own, *others = every.add_(self.mask).softmax(dim=-1).split(widths, dim=-1)
        found = torch.matmul(own, values)
        for one, chances in zip(self.stems, others, strict=True):
            found += one.values(layer, chances)
        return found


@dataclass(slots=True)
class Cached:
    """The attention context of a decoding step: token b of the step belongs to `rows[b]`, which has room for it."""

    rows: Sequence[Row]
    _slices: list[_Slice] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._slices.extend(_slices(self.rows))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """query [1, Hq, B, D], key and value [1, Hkv, B, D] -> [1, B, Hq, D]."""
        query, key, value = (one[0].transpose(0, 1) for one in (query, key, value))
        found = [part.attend(layer, query, key, value, scale) for part in self._slices]
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        for part, rows in zip(self._slices, found, strict=True):
            output.index_copy_(0, part.tokens, rows)
        return output[None]

    def advance(self) -> None:
        """After the pass: every row is one token longer."""
        for row in self.rows:
            row.length += 1


def _slices(rows: Sequence[Row]) -> Iterator[_Slice]:
    places = {id(row): place for place, row in enumerate(rows)}
    for bank in {id(row.bank): row.bank for row in rows}.values():
        device, heads = bank.shape.device, bank.shape.heads
        lengths = torch.tensor([row.length for row in bank.rows], device=device)
        first = torch.arange(len(bank.rows) * heads, device=device).view(-1, heads) * bank.capacity
        stems = tuple(_stems(bank))
        seen = torch.arange(bank.capacity, device=device)[None] <= lengths[:, None]
        mask = additive(torch.cat([seen, *(one.seen for one in stems)], dim=1), bank.shape.dtype, device)
        tokens = torch.tensor([places[id(row)] for row in bank.rows], device=device)
        yield _Slice(bank, tokens, (first + lengths[:, None]).flatten(), mask[:, None, None], stems)


def _stems(bank: Bank) -> Iterator[_Stems]:
    """The banks that a bank's rows go on from."""
    device = bank.shape.device
    for stems in {id(row.stem.bank): row.stem.bank for row in bank.rows if row.stem is not None}.values():
        mine = [row.stem if row.stem is not None and row.stem.bank is stems else None for row in bank.rows]
        readers: list[list[int]] = [[] for _ in stems.rows]
        for number, stem in enumerate(mine):
            if stem is not None:
                readers[stem.row].append(number)
        most = max(len(numbers) for numbers in readers)
        at = {number: row * most + place for row, numbers in enumerate(readers) for place, number in enumerate(numbers)}
        lengths = torch.tensor([stem.length if stem is not None else 0 for stem in mine], device=device)[:, None]
        yield _Stems(
            bank=stems,
            readers=torch.tensor(
                [[*numbers, *[0] * (most - len(numbers))] for numbers in readers], device=device
            ).flatten(),
            places=torch.tensor([at.get(number, 0) for number in range(len(mine))], device=device),
            reads=None if None not in mine else (lengths > 0)[:, :, None, None].to(bank.shape.dtype),
            seen=torch.arange(stems.capacity, device=device)[None] < lengths,
        )
