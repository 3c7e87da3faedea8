"""Attention of a decoding step over pages: one new token of every row, in one call for all rows of a layer.

Everything is a tensor: the pages of each row and its length are read on the device, so that the operators of a step are
the same whatever the rows are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine.model.architectures.latents import Latents
from tinsmith.engine.model.attention_rule import AttentionRule
from tinsmith.engine.sampling.capacity import PAGE_TOKENS
from tinsmith.engine.sampling.paged.pages import UNUSED, PagedCache, PagedRow


@dataclass(frozen=True, slots=True)
class NewTokens:
    """The keys and values of a step's B tokens, which belong into the pages."""

    key: Tensor
    """[B, Hkv, D]."""
    value: Tensor
    """[B, Hkv, width of values]."""
    targets: Tensor
    """int64 [B Hkv]: where each is written, as an index into all token slots of a layer."""


class AttendPages(Protocol):
    """Attention of B queries over rows of pages. A row's result depends on nothing but the row."""

    def __call__(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        tables: Tensor,
        lengths: Tensor,
        rule: AttentionRule,
        new: NewTokens | None = None,
    ) -> Tensor:
        """query [B, Hq, D], keys and values [pages, Hkv, PAGE_TOKENS, width], tables int32 [B, W] (the row's pages),
        lengths int64 [B] (its tokens, the new one included) -> [B, Hq, width of values]. Writes `new` first."""
        ...


@dataclass(slots=True)
class PagedAttention:
    """Attention context of a decoding step: token b belongs to the row of pages `tables[b]`."""

    cache: PagedCache
    attend_pages: AttendPages
    tables: Tensor
    """int32 [B, W]."""
    lengths: Tensor
    """int64 [B]: tokens of the row after the step."""
    targets: Tensor
    """Those of `NewTokens`."""
    rows: Sequence[PagedRow] = ()
    """Those that `advance` counts a token of."""
    cached_queries: int = 1

    @classmethod
    def of(cls, cache: PagedCache, attend_pages: AttendPages, tables: Tensor, past: Tensor) -> PagedAttention:
        """For rows that have `past` tokens, int64 [B]."""
        heads = torch.arange(cache.shape.heads, device=tables.device)
        page = tables.gather(1, (past // PAGE_TOKENS)[:, None]).long()
        targets = (page * cache.shape.heads + heads) * PAGE_TOKENS + (past % PAGE_TOKENS)[:, None]
        return cls(cache, attend_pages, tables, past + 1, targets.flatten())

    @classmethod
    def of_rows(cls, cache: PagedCache, attend_pages: AttendPages, rows: Sequence[PagedRow]) -> PagedAttention:
        """For a step of these rows alone."""
        for row in rows:
            cache.ensure_space(row)
        cache.copy_pages()
        width = max(len(row.pages) for row in rows)
        tables = torch.from_numpy(table_of(rows, len(rows), width)).to(cache.shape.device)
        past = torch.tensor([row.length for row in rows], device=cache.shape.device)
        return replace(cls.of(cache, attend_pages, tables, past), rows=rows)

    def advance(self) -> None:
        """Count the new token of every row, once the pass is done."""
        for row in self.rows:
            row.length += 1

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule, latents: Latents | None = None
    ) -> Tensor:
        """query [1, Hq, B, D], key and value [1, Hkv, B, D] -> [1, B, Hq, D]."""
        assert latents is None
        query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        new = NewTokens(key, value, self.targets)
        return self.attend_pages(query, keys, values, self.tables, self.lengths, rule, new)[None]


def table_of(rows: Sequence[PagedRow], count: int, width: int) -> np.ndarray:
    """The pages of each row, int32 [count, width]; UNUSED beyond."""
    table = np.full((count, width), UNUSED, np.int32)
    for number, row in enumerate(rows):
        table[number, : len(row.pages)] = row.pages
    return table


def attend_gathered(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    rule: AttentionRule,
    new: NewTokens | None = None,
) -> Tensor:
    """`AttendPages` by PyTorch's operators, in float32: each row's pages are gathered."""
    if new is not None:
        for pages, content in ((keys, new.key), (values, new.value)):
            pages.view(-1, pages.shape[-1]).index_copy_(0, new.targets, content.flatten(0, 1))
    index = tables.flatten()
    keys, values = (
        pages.index_select(0, index).unflatten(0, tables.shape).transpose(1, 2).flatten(2, 3).float()
        for pages in (keys, values)
    )  # [B, Hkv, K, D]
    at = torch.arange(keys.shape[2], device=keys.device)
    visible = at < lengths[:, None]
    if rule.window is not None:
        visible &= at >= lengths[:, None] - rule.window
    visible = visible[:, None, None]
    values = torch.where(visible.mT, values, 0.0)  # what a page holds after its row may be NaN
    grouped = (query.float() * rule.scale).unflatten(1, (keys.shape[1], -1))  # [B, Hkv, G, D]
    scores = grouped @ keys.mT
    if rule.softcap is not None:
        scores = (scores / rule.softcap).tanh() * rule.softcap
    scores = scores.masked_fill(~visible, float("-inf"))
    if rule.sinks is not None:
        sinks = rule.sinks.float().view(keys.shape[1], -1, 1).expand(len(query), -1, -1, -1)
        probs = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    else:
        probs = scores.softmax(-1)
    return (probs @ values).flatten(1, 2).to(query.dtype)
