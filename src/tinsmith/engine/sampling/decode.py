"""Attention of a decoding step: one new token of every running sequence, each over its own row of the cache.

A bank's rows are one call. What several sequences begin with is a row of its own, a stem, whose keys are read once for
all of them, their queries side by side; one softmax then goes over a sequence's stem and its row together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tinsmith.engine.model.attention import additive, attend_once
from tinsmith.engine.sampling.kv_cache import Bank, Row


@dataclass(frozen=True, slots=True)
class _Stems:
    """A bank of S stems as the rows of another bank read them, up to M of these each."""

    bank: Bank
    readers: Tensor
    """int64 [S Hkv M]: which row and head reads it as which of its readers; where there is none, any."""
    places: Tensor
    """int64 [rows Hkv]: where each stands in `readers`; for a row that reads none of these, any."""
    idle: Tensor | None
    """int64: of the rows and heads, those that read none of these; None if all do."""
    seen: Tensor
    """bool [rows, capacity]."""

    def scores(self, layer: int, queries: Tensor) -> Tensor:
        """queries [rows Hkv, G, D] -> [rows Hkv, G, capacity]; of no meaning where `seen` is false; 0 for the idle."""
        return self._product(queries, self.bank.content(layer)[0].mT)

    def values(self, layer: int, chances: Tensor) -> Tensor:
        """chances [rows Hkv, G, capacity] -> their sums of the values [rows Hkv, G, D]; 0 for the idle."""
        return self._product(chances, self.bank.content(layer)[1])

    def _product(self, rows: Tensor, matrices: Tensor) -> Tensor:
        """rows [rows Hkv, G, X], matrices [S Hkv, X, Y] -> [rows Hkv, G, Y], the readers of a stem side by side."""
        together = rows.index_select(0, self.readers).view(len(matrices), -1, rows.shape[2])
        found = torch.bmm(together, matrices).view(len(self.readers), rows.shape[1], -1)
        mine = found.index_select(0, self.places)
        # An idle row was given another's numbers: these may be NaN, which no mask and no factor of 0 would hold back.
        return mine if self.idle is None else mine.index_fill_(0, self.idle, 0.0)


@dataclass(frozen=True, slots=True)
class _Slice:
    """One bank's part in a step: which of the step's tokens are its rows', and what each may see."""

    bank: Bank
    tokens: slice | Tensor
    """int64 [rows of the bank]: place in the step of row 0, 1, …; a slice where they stand there in this order."""
    at: Tensor
    """int64 [rows Hkv]: where each row's new token goes, among all places of a layer in the bank."""
    mask: Tensor
    """Additive [rows Hkv, 1, capacity and that of the stems]."""
    stems: tuple[_Stems, ...]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """query [B, Hq, D], key and value [B, Hkv, D] -> [rows, Hq, D]."""
        keys, values = self.bank.content(layer)
        for bank, new in ((keys, key), (values, value)):
            bank.view(-1, bank.shape[-1]).index_copy_(0, self.at, new[self.tokens].flatten(0, 1))
        mine = query[self.tokens]
        # Query heads that share a key head stand as rows of one small matrix: [rows Hkv, Hq / Hkv, D].
        queries = mine.reshape(len(keys), -1, mine.shape[-1])
        if query.device.type != "cpu":
            mask = self.mask[:, None].expand(-1, 1, queries.shape[1], -1)
            return attend_once(queries[:, None], keys[:, None], values[:, None], mask, scale).reshape(mine.shape)
        return self._weighed(layer, queries * scale, keys, values).view(mine.shape)

    def _weighed(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Written out: with one new token to a row, the CPU's flash kernel takes more than twice as long. Rows are read
        up to their capacity, since a product over a part of each would first copy it."""
        scores = torch.bmm(queries, keys.mT)
        if not self.stems:
            return torch.bmm(scores.add_(self.mask).softmax(dim=-1), values)
        every = torch.cat([scores, *(one.scores(layer, queries) for one in self.stems)], dim=-1)
        widths = [self.bank.capacity, *(one.bank.capacity for one in self.stems)]
        own, *others = every.add_(self.mask).softmax(dim=-1).split(widths, dim=-1)
        found = torch.bmm(own, values)
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
        if len(found) == 1 and isinstance(self._slices[0].tokens, slice):
            return found[0][None]
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        for part, rows in zip(self._slices, found, strict=True):
            output[part.tokens] = rows
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
        yield _Slice(
            bank=bank,
            tokens=_run([places[id(row)] for row in bank.rows], device),
            at=(first + lengths[:, None]).flatten(),
            mask=mask.repeat_interleave(heads, 0)[:, None],
            stems=stems,
        )


def _run(places: Sequence[int], device: torch.device) -> slice | Tensor:
    """As an index: a slice if each place follows the one before."""
    start, stop = places[0], places[0] + len(places)
    return slice(start, stop) if list(places) == list(range(start, stop)) else torch.tensor(places, device=device)


def _stems(bank: Bank) -> Iterator[_Stems]:
    """The banks that a bank's rows go on from."""
    device, heads = bank.shape.device, bank.shape.heads
    each = torch.arange(heads, device=device)
    for stems in {id(row.stem.bank): row.stem.bank for row in bank.rows if row.stem is not None}.values():
        mine = [row.stem if row.stem is not None and row.stem.bank is stems else None for row in bank.rows]
        readers: list[list[int]] = [[] for _ in stems.rows]
        for number, stem in enumerate(mine):
            if stem is not None:
                readers[stem.row].append(number)
        most = max(len(numbers) for numbers in readers)
        at = {number: (row, place) for row, numbers in enumerate(readers) for place, number in enumerate(numbers)}
        whose, place = torch.tensor([at.get(number, (0, 0)) for number in range(len(mine))], device=device).T[..., None]
        rows = torch.tensor([[*numbers, *[0] * (most - len(numbers))] for numbers in readers], device=device)
        lengths = torch.tensor([stem.length if stem is not None else 0 for stem in mine], device=device)[:, None]
        idle = (lengths == 0).repeat_interleave(heads, 0)[:, 0].nonzero()[:, 0]
        yield _Stems(
            bank=stems,
            readers=(rows[:, None] * heads + each[:, None]).flatten(),
            places=((whose * heads + each) * most + place).flatten(),
            idle=idle if None in mine else None,
            seen=torch.arange(stems.capacity, device=device)[None] < lengths,
        )
