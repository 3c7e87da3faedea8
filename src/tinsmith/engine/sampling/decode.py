"""Attention of a decoding step: one new token of every running sequence, each over its own cache row.

The rows of a bank are one call. A shared prefix is read once for all of its sequences: their queries are placed side by
side, and one softmax then covers the prefix and the row of each sequence.

On a CPU a compiled function (`engine.cpu.decoding`) computes a step row by row, in a third of the time; not with soft
caps or sinks, nor where many rows share a long prefix, unless it multiplies pairs of bfloat16 numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import InitVar, dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine.cpu import openmp
from tinsmith.engine.cpu.arguments import has_loops
from tinsmith.engine.cpu.instructions import kind_of
from tinsmith.engine.model.architectures.latents import Latents
from tinsmith.engine.model.attention_kernels import (
    additive_mask,
    attend,
    cap_scores,
    needs_products,
    softmax_with_sinks,
)
from tinsmith.engine.model.attention_rule import AttentionRule
from tinsmith.engine.model.hybrid.states import HybridContext, RecurrentShape
from tinsmith.engine.sampling.kv_cache import Bank, CacheRow, CacheShape
from tinsmith.engine.sampling.state_bank import DecodeStates, StateBank

MAX_PREFIX_NUMBERS = 1 << 24
"""Numbers of shared prefixes that the compiled function reads again for each of their rows, at most, where it widens
bfloat16 numbers. Products read a prefix once for all of its rows."""
THREAD_NUMBERS = 1 << 16
"""Numbers of a layer's cache from which several threads are faster than one."""

AttentionFunction = Callable[[int], Any]
"""`decoding.attention_function` for the tokens of a cache: the C function by queries of a key head."""


def attention_function(shape: CacheShape) -> AttentionFunction | None:
    """The compiled attention for rows of this shape, unchecked; None where there are no compiled loops."""
    if not has_loops(shape.device, shape.dtype):
        return None

    def function(group: int) -> Any:
        from tinsmith.engine.cpu import decoding  # where it fails, the check of decoding says so

        width, stride = shape.value_width or shape.latent_width, shape.value_width or shape.key_width
        return decoding.attention_function(kind_of(shape.dtype), group, shape.key_width, width, stride)

    return function


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
    visible: Tensor
    """bool [rows, capacity + capacity of the shared prefixes]."""
    distances: Callable[[], Tensor]
    """Computes int64 [rows, the same]: how many tokens each key is before the new token."""
    prefixes: tuple[_SharedPrefixes, ...]
    masks: dict[int | None, Tensor] = field(default_factory=dict)
    """By window: additive [rows Hkv, 1, capacity + capacity of the shared prefixes]."""

    def mask(self, window: int | None) -> Tensor:
        """The mask of layers with this window; computed once for a step."""
        if window not in self.masks:
            visible = self.visible if window is None else self.visible & (self.distances() < window)
            mask = additive_mask(visible, self.bank.shape.dtype, self.bank.shape.device)
            self.masks[window] = mask.repeat_interleave(self.bank.shape.heads, 0)[:, None]
        return self.masks[window]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        """query [B, Hq, D], key and value [B, Hkv, D] -> [rows, Hq, D]; widths of keys and values may differ."""
        keys, values = self.bank.content(layer)
        # Values among the keys, those of latents, are written with them.
        for cache, new in ((keys, key), (values, value)) if self.bank.shape.value_width else ((keys, key),):
            cache.view(-1, cache.shape[-1]).index_copy_(0, self.targets, new[self.tokens].flatten(0, 1))
        query = query[self.tokens]
        # Query heads that share a key head are rows of one small matrix: [rows Hkv, Hq / Hkv, D].
        queries = query.reshape(len(keys), -1, query.shape[-1])
        shape = (*query.shape[:2], values.shape[-1])
        if query.device.type != "cpu" and not needs_products(rule, query.device):
            mask = self.mask(rule.window)[:, None].expand(-1, 1, queries.shape[1], -1)
            return attend(queries[:, None], keys[:, None], values[:, None], mask, rule).reshape(shape)
        return self._attend_by_products(layer, queries * rule.scale, keys, values, rule).view(shape)

    def _attend_by_products(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, rule: AttentionRule
    ) -> Tensor:
        """Attention written out: with one new token per row, the CPU's flash kernel takes more than twice as long. Rows
        are read up to their capacity, since a product over part of each row would first copy it."""
        scores = torch.bmm(queries, keys.mT)
        if not self.prefixes:
            return torch.bmm(self._probs(scores, rule), values)
        all_scores = torch.cat([scores, *(prefixes.scores(layer, queries) for prefixes in self.prefixes)], dim=-1)
        widths = [self.bank.capacity, *(prefixes.bank.capacity for prefixes in self.prefixes)]
        own_probs, *prefix_probs = self._probs(all_scores, rule).split(widths, dim=-1)
        output = torch.bmm(own_probs, values)
        for prefixes, probs in zip(self.prefixes, prefix_probs, strict=True):
            output += prefixes.weighted_values(layer, probs)
        return output

    def _probs(self, scores: Tensor, rule: AttentionRule) -> Tensor:
        """The softmax of scores [rows Hkv, G, keys] under the rule; overwrites them."""
        scores = cap_scores(scores, rule).add_(self.mask(rule.window))
        if rule.sinks is None:
            return scores.softmax(dim=-1)
        sinks = rule.sinks.view(self.bank.shape.heads, -1).repeat(len(self.bank.rows), 1)
        return softmax_with_sinks(scores, sinks)


@dataclass(frozen=True, slots=True)
class CompiledStep:
    """A step that a compiled function computes."""

    shape: CacheShape
    function: AttentionFunction
    step: np.ndarray
    """One `decoding.STEP`."""
    table: np.ndarray
    """`decoding.PART` [rows, parts]: what is to be read of each row."""
    threads: int

    @classmethod
    def of(cls, rows: Sequence[CacheRow], function: AttentionFunction) -> CompiledStep | None:
        """The step; None if products take less time."""
        from tinsmith.engine.cpu import decoding

        shape = rows[0].bank.shape
        width = shape.heads * (shape.key_width + (shape.value_width or shape.latent_width))
        prefixes = [row.shared_prefix for row in rows if row.shared_prefix]
        once = {id(row): row for row in prefixes}.values()
        again = sum(row.length for row in prefixes) - sum(row.length for row in once)
        if again * width > MAX_PREFIX_NUMBERS and kind_of(shape.dtype) == "bfloat16":
            return None
        # Where some rows have a shared prefix, the others have themselves in its place, without a token.
        parts = [[row.shared_prefix or row, row] if prefixes else [row] for row in rows]
        lengths = [[row.position - row.length, row.length + 1][not prefixes :] for row in rows]
        table = np.array(
            [
                [
                    (*_addresses(part), *_strides(part.bank, 0), part.bank.capacity, length)
                    for part, length in zip(*row, strict=True)
                ]
                for row in zip(parts, lengths, strict=True)
            ],
            decoding.PART,
        )
        step = np.zeros(1, decoding.STEP)
        step["rows"], step["parts"], step["heads"], step["table"] = *table.shape, shape.heads, table.ctypes.data
        tokens = [row.position + 1 for row in rows]
        step["line"] = (max(tokens) // decoding.LINE + 3) * decoding.LINE
        threads = torch.get_num_threads() if sum(tokens) * width >= THREAD_NUMBERS else 1
        return cls(shape, function, step, table, min(threads, len(rows) * shape.heads))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        """query [B, Hq, D], key and value [B, Hkv, D] -> [B, Hq, D]; widths of keys and values may differ."""
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        output = query.new_empty(*query.shape[:2], value.shape[2])
        step = self.step
        step["next"], step["layer"], step["window"], step["scale"] = 0, layer, rule.window or 0, rule.scale
        step["queries"], step["outputs"] = query.data_ptr(), output.data_ptr()
        step["new_keys"], step["new_values"] = key.data_ptr(), value.data_ptr()
        openmp.run(self.function(query.shape[1] // self.shape.heads), step.ctypes.data, self.threads)
        return output


def _addresses(row: CacheRow) -> list[int]:
    """The addresses of a row's keys and values in the first layer, without a view, which takes microseconds."""
    first_row = [tensor.data_ptr() for tensor in _tensors(row.bank)]
    return [start + row.index * stride for start, stride in zip(first_row, _strides(row.bank, 1), strict=True)]


def _strides(bank: Bank, dim: int) -> list[int]:
    """Bytes from one layer (dim 0) or row (dim 1) of a bank's keys and values to the next."""
    return [tensor.stride(dim) * tensor.itemsize for tensor in _tensors(bank)]


def _tensors(bank: Bank) -> tuple[Tensor, Tensor]:
    """A bank's keys and values; of latents, which have their values among them, the keys twice."""
    return bank.keys, bank.values if bank.shape.value_width else bank.keys


@dataclass(slots=True)
class DecodeAttention:
    """Attention context of a decoding step: token b of the step belongs to `rows[b]`, which has space for it."""

    rows: Sequence[CacheRow]
    function: InitVar[AttentionFunction | None] = None
    """Computes what it can."""
    compiled: CompiledStep | None = None
    """The step, where the function computes it."""
    _banks: list[_BankStep] = field(default_factory=list)
    cached_queries: int = 1

    def __post_init__(self, function: AttentionFunction | None) -> None:
        self.compiled = None if function is None else CompiledStep.of(self.rows, function)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule, latents: Latents | None = None
    ) -> Tensor:
        """query [1, Hq, B, D], key and value [1, Hkv, B, D] -> [1, B, Hq, D]."""
        query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        if self.compiled is not None and rule.is_softmax:
            return self.compiled.attend(layer, query, key, value, rule)[None]
        if not self._banks:
            self._banks.extend(_bank_steps(self.rows))
        outputs = [bank.attend(layer, query, key, value, rule) for bank in self._banks]
        if len(outputs) == 1 and isinstance(self._banks[0].tokens, slice):
            return outputs[0][None]
        output = query.new_empty(*query.shape[:2], value.shape[-1])
        for bank, rows in zip(self._banks, outputs, strict=True):
            output[bank.tokens] = rows
        return output[None]

    def advance(self) -> None:
        """Count the new token of every row, once the pass is done."""
        for row in self.rows:
            row.length += 1


def step_context(
    attention: DecodeAttention, shape: RecurrentShape | None, states: StateBank | None
) -> DecodeAttention | HybridContext:
    """The context of a decoding step, with the states of its rows if the model has recurrent layers."""
    if shape is None or states is None:
        return attention
    return HybridContext(shape, attention, DecodeStates(states, [row.state for row in attention.rows if row.state]))


def _bank_steps(rows: Sequence[CacheRow]) -> Iterator[_BankStep]:
    step_index = {id(row): index for index, row in enumerate(rows)}
    for bank in {id(row.bank): row.bank for row in rows}.values():
        device, heads = bank.shape.device, bank.shape.heads
        lengths = torch.tensor([row.length for row in bank.rows], device=device)
        starts = torch.arange(len(bank.rows) * heads, device=device).view(-1, heads) * bank.capacity
        prefixes = tuple(_shared_prefixes(bank))
        visible = torch.arange(bank.capacity, device=device)[None] <= lengths[:, None]
        yield _BankStep(
            bank=bank,
            tokens=_as_index([step_index[id(row)] for row in bank.rows], device),
            targets=(starts + lengths[:, None]).flatten(),
            visible=torch.cat([visible, *(shared.visible for shared in prefixes)], dim=1),
            distances=partial(_distances, bank, prefixes),
            prefixes=prefixes,
        )


def _distances(bank: Bank, prefixes: Sequence[_SharedPrefixes]) -> Tensor:
    """int64 [rows, keys]: how many tokens each key of a bank and its shared prefixes is before the row's new token."""
    device = bank.shape.device
    lengths = torch.tensor([row.length for row in bank.rows], device=device)
    positions = torch.tensor([row.position for row in bank.rows], device=device)
    own = lengths[:, None] - torch.arange(bank.capacity, device=device)
    earlier = (positions[:, None] - torch.arange(shared.bank.capacity, device=device) for shared in prefixes)
    return torch.cat([own, *earlier], dim=1)


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
