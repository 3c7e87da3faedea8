"""Attention of a decoding step: one new token of every running sequence, each over its own row of the cache.

A bank's rows are one call. What several sequences begin with and hold in common is read once for all of them, their
queries side by side; the two parts of such a sequence are then weighed by what their softmaxes summed to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tinsmith.engine.attention import additive, attend_once
from tinsmith.engine.cache import Bank, Row
from tinsmith.engine.prefixes import Found, Run


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
    continues: bool
    """Whether some of its rows go on from what others read too."""


@dataclass(frozen=True, slots=True)
class _Shared:
    """What several sequences begin with: each beginning, and how many of `tokens` (int64 [M], in order) are its own."""

    found: Sequence[tuple[Found, int]]
    tokens: Tensor

    def attend(self, layer: int, query: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """query [Hq, M, D] -> float32 [M, Hq, D], and what the softmaxes summed to, as logarithms [M, Hq]."""
        heads, group = self._heads(query)
        wide = (query * scale).unflatten(0, (heads, group)).transpose(1, 2).contiguous()  # [Hkv, M, G, D]
        parts, sums = list[Tensor](), list[Tensor]()
        at = 0
        for found, count in self.found:
            seen = [(run.keys[layer, :, :length], run.values[layer, :, :length]) for run, length in found.pieces]
            part, summed = _weighed(wide[:, at : at + count].flatten(1, 2), seen, None)
            parts.append(part)
            sums.append(summed)
            at += count
        every, total = torch.cat(parts, dim=1).unflatten(1, (-1, group)), torch.cat(sums, dim=1)
        return every.transpose(0, 1).flatten(1, 2), total.unflatten(1, (-1, group)).transpose(0, 1).flatten(1)

    def _heads(self, query: Tensor) -> tuple[int, int]:
        """Key heads, and query heads to each."""
        heads = self.found[0][0].pieces[0][0].keys.shape[1]
        return heads, len(query) // heads


@dataclass(slots=True)
class Cached:
    """The attention context of a decoding step: token b of the step belongs to `rows[b]`, which has room for it."""

    rows: Sequence[Row]
    _slices: list[_Slice] = field(default_factory=list)
    _shared: _Shared | None = None

    def __post_init__(self) -> None:
        self._slices.extend(_slices(self.rows))
        self._shared = _shared(self.rows)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """query [1, Hq, B, D], key and value [1, Hkv, B, D] -> [1, B, Hq, D]."""
        output = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format)
        sums = query.new_empty(output.shape[1:3], dtype=torch.float32)
        for part in self._slices:
            count = len(part.tokens)
            order = torch.arange(count, device=query.device)
            keys, values = part.bank.keys[layer], part.bank.values[layer]
            keys[order, :, part.at] = key[0, :, part.tokens].transpose(0, 1)
            values[order, :, part.at] = value[0, :, part.tokens].transpose(0, 1)
            # Query heads that share a key head stand as rows of one small matrix: [rows, Hkv, Hq / Hkv, D].
            queries = query[0, :, part.tokens].transpose(0, 1).unflatten(1, (keys.shape[1], -1))
            if part.continues:
                found, summed = _weighed(queries * scale, [(keys[:count], values[:count])], part.mask)
                sums[part.tokens] = summed.flatten(1, 2)
            else:
                found = _attended(queries, keys[:count], values[:count], part.mask, scale)
            output[0, part.tokens] = found.flatten(1, 2).to(output.dtype)
        if self._shared is not None:
            tokens = self._shared.tokens
            _blend(output[0], sums, tokens, *self._shared.attend(layer, query[0, :, tokens], scale))
        return output

    def advance(self) -> None:
        """After the pass: every row is one token longer."""
        for row in self.rows:
            row.length += 1


def _slices(rows: Sequence[Row]) -> Iterator[_Slice]:
    places = {id(row): place for place, row in enumerate(rows)}
    for bank in {id(row.bank): row.bank for row in rows}.values():
        device = bank.shape.device
        tokens = torch.tensor([places[id(row)] for row in bank.rows], device=device)
        at = torch.tensor([row.length for row in bank.rows], device=device)
        seen = torch.arange(bank.capacity, device=device)[None] <= at[:, None]
        mask = additive(seen, bank.shape.dtype, device)
        yield _Slice(bank, tokens, at, mask[:, None, None], any(row.before.pieces for row in bank.rows))


def _shared(rows: Sequence[Row]) -> _Shared | None:
    together: dict[tuple[tuple[Run, int], ...], list[int]] = {}
    for place, row in enumerate(rows):
        if row.before.pieces:
            together.setdefault(row.before.pieces, []).append(place)
    if not together:
        return None
    tokens = torch.tensor([place for places in together.values() for place in places], device=rows[0].bank.shape.device)
    return _Shared([(Found(pieces), len(places)) for pieces, places in together.items()], tokens)


def _attended(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """query [R, Hkv, G, D], key and value [R, Hkv, L, D] -> [R, Hkv, G, D].

    Written out: with one new token to a row, the CPU's flash kernel takes more than twice as long. Rows are read up to
    their capacity, since a product over a part of each would first copy it.
    """
    if query.device.type != "cpu":
        return attend_once(query, key, value, mask.expand(-1, 1, query.shape[2], -1), scale)
    scores = torch.matmul(query * scale, key.transpose(2, 3)).add_(mask)
    return torch.matmul(scores.softmax(dim=-1), value)


def _weighed(query: Tensor, seen: Sequence[tuple[Tensor, Tensor]], mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """query [..., Q, D], keys and values [..., K, D] -> float32 [..., Q, D], and what the softmax summed to, as a
    logarithm [..., Q]. `torch.logsumexp` on a CPU is ten times as slow."""
    scores = [torch.matmul(query, key.mT) for key, _ in seen]
    joined = scores[0] if len(scores) == 1 else torch.cat(scores, dim=-1)
    if mask is not None:
        joined.add_(mask)
    top = joined.amax(dim=-1, keepdim=True)
    chances = joined.sub_(top).exp_()
    total = chances.sum(dim=-1, keepdim=True, dtype=torch.float32)
    pieces = chances.split([key.shape[-2] for key, _ in seen], dim=-1)
    parts = [torch.matmul(piece, value).float() for piece, (_, value) in zip(pieces, seen, strict=True)]
    return sum(parts[1:], parts[0]) / total, (total.log() + top)[..., 0]


def _blend(output: Tensor, sums: Tensor, tokens: Tensor, found: Tensor, summed: Tensor) -> None:
    """Weigh what these tokens have in output [B, Hq, D], which summed to `sums` [B, Hq], with what is before it."""
    share = torch.sigmoid(summed - sums[tokens])[..., None]
    output[tokens] = torch.lerp(output[tokens].float(), found, share).to(output.dtype)
