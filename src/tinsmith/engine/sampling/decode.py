"""Attention of a decoding step: one new token of every running sequence, each over its own cache row.

The rows of a bank are one call. A shared prefix is read once for all of its sequences: their queries are placed side by
side, and one softmax then covers the prefix and the row of each sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tinsmith.engine.model.attention import additive_mask, attend
from tinsmith.engine.sampling.kv_cache import Bank, CacheRow


@dataclass(frozen=True, slots=True)
class _SharedPrefixes:
    """A bank of S shared prefixes as read by the rows of another bank, up to M rows for each prefix."""

    bank: Bank
    readers: Tensor
    """int64 [S Hkv M]: row and head that is each reader of a prefix; arbitrary where there is no reader."""
    reader_index: Tensor
    """int64 [rows Hkv]: index of each row and head in `readers`; arbitrary for rows that read none of these."""
    non_readers: Tensor | None
    """int64: rows and heads that read none of these prefixes; None if all rows do."""
    visible: Tensor
    """bool [rows, capacity]."""

    def scores(self, layer: int, queries: Tensor) -> Tensor:
        """queries [rows Hkv, G, D] -> [rows Hkv, G, capacity]; undefined where not `visible`; 0 for non-readers."""
        return self._product(queries, self.bank.content(layer)[0].mT)

    def weighted_values(self, layer: int, probs: Tensor) -> Tensor:
        """probs [rows Hkv, G, capacity] -> weighted sums of the values [rows Hkv, G, D]; 0 for non-readers."""
        return self._product(probs, self.bank.content(layer)[1])

    def _product(self, rows: Tensor, matrices: Tensor) -> Tensor:
        """rows [rows Hkv, G, X], matrices [S Hkv, X, Y] -> [rows Hkv, G, Y], with the readers of a prefix side by
        side."""
        grouped = rows.index_select(0, self.readers).view(len(matrices), -1, rows.shape[2])
        products = torch.bmm(grouped, matrices).view(len(self.readers), rows.shape[1], -1)
        output = products.index_select(0, self.reader_index)
        # Non-readers got another row's numbers. These may be NaN, which neither a mask nor a factor of 0 removes.
        return output if self.non_readers is None else output.index_fill_(0, self.non_readers, 0.0)


@dataclass(frozen=True, slots=True)
class _BankStep:
    """One bank's part of a step: which tokens of the step belong to its rows, and which keys each attends to."""

    bank: Bank
    tokens: slice | Tensor
    """int64 [rows of the bank]: index in the step of row 0, 1, …; a slice where these are consecutive."""
    targets: Tensor
    """int64 [rows Hkv]: where each row's new token is written, as an index into all token slots of a layer."""
    mask: Tensor
    """Additive [rows Hkv, 1, capacity + capacity of the shared prefixes]."""
    prefixes: tuple[_SharedPrefixes, ...]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """query [B, Hq, D], key and value [B, Hkv, D] -> [rows, Hq, D]."""
        keys, values = self.bank.content(layer)
        for cache, new in ((keys, key), (values, value)):
            cache.view(-1, cache.shape[-1]).index_copy_(0, self.targets, new[self.tokens].flatten(0, 1))
        query = query[self.tokens]
        # Query heads that share a key head are rows of one small matrix: [rows Hkv, Hq / Hkv, D].
        queries = query.reshape(len(keys), -1, query.shape[-1])
        if query.device.type != "cpu":
            mask = self.mask[:, None].expand(-1, 1, queries.shape[1], -1)
            return attend(queries[:, None], keys[:, None], values[:, None], mask, scale).reshape(query.shape)
        return self._attend_by_products(layer, queries * scale, keys, values).view(query.shape)

    def _attend_by_products(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attention written out: with one new token per row, the CPU's flash kernel takes more than twice as long. Rows
        are read up to their capacity, since a product over part of each row would first copy it."""
        scores = torch.bmm(queries, keys.mT)
        if not self.prefixes:
            return torch.bmm(scores.add_(self.mask).softmax(dim=-1), values)
        all_scores = torch.cat([scores, *(prefixes.scores(layer, queries) for prefixes in self.prefixes)], dim=-1)
        widths = [self.bank.capacity, *(prefixes.bank.capacity for prefixes in self.prefixes)]
        own_probs, *prefix_probs = all_scores.add_(self.mask).softmax(dim=-1).split(widths, dim=-1)
        output = torch.bmm(own_probs, values)
        for prefixes, probs in zip(self.prefixes, prefix_probs, strict=True):
            output += prefixes.weighted_values(layer, probs)
        return output


@dataclass(slots=True)
class DecodeAttention:
    """Attention context of a decoding step: token b of the step belongs to `rows[b]`, which has space for it."""

    rows: Sequence[CacheRow]
    _banks: list[_BankStep] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._banks.extend(_bank_steps(self.rows))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """query [1, Hq, B, D], key and value [1, Hkv, B, D] -> [1, B, Hq, D]."""
        query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        outputs = [bank.attend(layer, query, key, value, scale) for bank in self._banks]
        if len(outputs) == 1 and isinstance(self._banks[0].tokens, slice):
            return outputs[0][None]
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        for bank, rows in zip(self._banks, outputs, strict=True):
            output[bank.tokens] = rows
        return output[None]

    def advance(self) -> None:
        """Count the new token of every row, once the pass is done."""
        for row in self.rows:
            row.length += 1


def _bank_steps(rows: Sequence[CacheRow]) -> Iterator[_BankStep]:
    step_index = {id(row): index for index, row in enumerate(rows)}
    for bank in {id(row.bank): row.bank for row in rows}.values():
        device, heads = bank.shape.device, bank.shape.heads
        lengths = torch.tensor([row.length for row in bank.rows], device=device)
        starts = torch.arange(len(bank.rows) * heads, device=device).view(-1, heads) * bank.capacity
        prefixes = tuple(_shared_prefixes(bank))
        visible = torch.arange(bank.capacity, device=device)[None] <= lengths[:, None]
        mask = additive_mask(
            torch.cat([visible, *(shared.visible for shared in prefixes)], dim=1), bank.shape.dtype, device
        )
        yield _BankStep(
            bank=bank,
            tokens=_as_index([step_index[id(row)] for row in bank.rows], device),
            targets=(starts + lengths[:, None]).flatten(),
            mask=mask.repeat_interleave(heads, 0)[:, None],
            prefixes=prefixes,
        )


def _as_index(numbers: Sequence[int], device: torch.device) -> slice | Tensor:
    """The numbers as an index: a slice if they are consecutive."""
    start, stop = numbers[0], numbers[0] + len(numbers)
    return slice(start, stop) if list(numbers) == list(range(start, stop)) else torch.tensor(numbers, device=device)


def _shared_prefixes(bank: Bank) -> Iterator[_SharedPrefixes]:
    """The banks of shared prefixes that the rows of `bank` continue."""
    device, heads = bank.shape.device, bank.shape.heads
    head_index = torch.arange(heads, device=device)
    prefix_rows = [row.shared_prefix for row in bank.rows]
    for prefix_bank in {id(row.bank): row.bank for row in prefix_rows if row is not None}.values():
        prefixes = [row if row is not None and row.bank is prefix_bank else None for row in prefix_rows]
        readers: list[list[int]] = [[] for _ in prefix_bank.rows]
        for number, prefix in enumerate(prefixes):
            if prefix is not None:
                readers[prefix.index].append(number)
        width = max(len(numbers) for numbers in readers)
        slots = {number: (index, slot) for index, numbers in enumerate(readers) for slot, number in enumerate(numbers)}
        prefix_index, slot = torch.tensor(
            [slots.get(number, (0, 0)) for number in range(len(prefixes))], device=device
        ).T[..., None]
        rows = torch.tensor([[*numbers, *[0] * (width - len(numbers))] for numbers in readers], device=device)
        lengths = torch.tensor([prefix.length if prefix is not None else 0 for prefix in prefixes], device=device)
        non_readers = (lengths[:, None] == 0).repeat_interleave(heads, 0)[:, 0].nonzero()[:, 0]
        yield _SharedPrefixes(
            bank=prefix_bank,
            readers=(rows[:, None] * heads + head_index[:, None]).flatten(),
            reader_index=((prefix_index * heads + head_index) * width + slot).flatten(),
            non_readers=non_readers if None in prefixes else None,
            visible=torch.arange(prefix_bank.capacity, device=device)[None] < lengths[:, None],
        )
