"""`attention.attend_gathered` as Triton kernels, which read each row's pages in place.

A program has a part of SPLIT tokens of a row and the query heads that share a key head; a second kernel puts the parts
of a query head together, in order. Parts are cut at the same tokens of a row whatever else is in the batch, and parts
without tokens change no sum, so a row's numbers do not depend on the batch.
"""

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from tinsmith.engine.model.attention_rule import AttentionRule
from tinsmith.engine.sampling.capacity import PAGE_TOKENS
from tinsmith.engine.sampling.paged.attention import NewTokens

SPLIT = 512
"""Tokens of a part: eight pages."""
WIDE = 256
"""Heads wider than this are read half a page at a time."""


def attend_in_place(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    rule: AttentionRule,
    new: NewTokens | None = None,
) -> Tensor:
    """See `attention.AttendPages`."""
    if new is not None:
        _store(keys, values, new)
    rows, query_heads, width = query.shape
    heads, value_width = keys.shape[1], values.shape[3]
    splits = -(-tables.shape[1] * PAGE_TOKENS // SPLIT)
    sums = torch.empty(rows, query_heads, splits, value_width, dtype=torch.float32, device=query.device)
    weights = torch.empty(2, rows, query_heads, splits, dtype=torch.float32, device=query.device)
    output = query.new_empty(rows, query_heads, value_width)
    sizes = {"SPLITS": splits, "VALUE_WIDTH": value_width, "VALUE_BLOCK": triton.next_power_of_2(value_width)}
    attend_part[(rows, heads, splits)](  # pyright: ignore[reportIndexIssue]
        *(query.contiguous(), keys, values, tables, lengths, sums, weights[0], weights[1], rule.scale),
        TABLE_STRIDE=tables.stride(0),
        HEADS=heads,
        GROUP=query_heads // heads,
        GROUP_BLOCK=max(16, triton.next_power_of_2(query_heads // heads)),
        WIDTH=width,
        WIDTH_BLOCK=max(16, triton.next_power_of_2(width)),
        WINDOW=rule.window or 0,
        SOFTCAP=rule.softcap or 0.0,
        PAGE=PAGE_TOKENS,
        BLOCK=PAGE_TOKENS if max(width, value_width) <= WIDE else PAGE_TOKENS // 2,
        SPLIT=SPLIT,
        **{**sizes, "VALUE_BLOCK": max(16, sizes["VALUE_BLOCK"])},
    )
    sinks = query if rule.sinks is None else rule.sinks.contiguous()
    combine_parts[(rows, query_heads)](  # pyright: ignore[reportIndexIssue]
        *(sums, weights[0], weights[1], sinks, output),
        HEADS=query_heads,
        HAS_SINKS=rule.sinks is not None,
        **sizes,
    )
    return output


def _store(keys: Tensor, values: Tensor, new: NewTokens) -> None:
    rows, heads, width = new.key.shape
    value_width = new.value.shape[2]
    key, value = (part if part.stride(2) == 1 else part.contiguous() for part in (new.key, new.value))
    store_tokens[(rows, heads)](  # pyright: ignore[reportIndexIssue]
        *(key, value, keys, values, new.targets, *key.stride()[:2], *value.stride()[:2]),
        HEADS=heads,
        WIDTH=width,
        VALUE_WIDTH=value_width,
        BLOCK=triton.next_power_of_2(max(width, value_width)),
    )


@triton.jit
def store_tokens(
    key, value, keys, values, targets, KEY_ROW, KEY_HEAD, VALUE_ROW, VALUE_HEAD,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy a row's new key and value of one head into its page."""
    row, head, column = tl.program_id(0), tl.program_id(1), tl.arange(0, BLOCK)
    target = tl.load(targets + row * HEADS + head)
    new = tl.load(key + row * KEY_ROW + head * KEY_HEAD + column, mask=column < WIDTH)
    tl.store(keys + target * WIDTH + column, new, mask=column < WIDTH)
    new = tl.load(value + row * VALUE_ROW + head * VALUE_HEAD + column, mask=column < VALUE_WIDTH)
    tl.store(values + target * VALUE_WIDTH + column, new, mask=column < VALUE_WIDTH)


@triton.jit
def load_rows(pointer, slots, seen, columns, WIDTH: tl.constexpr):
    """Rows [slots, columns] of a matrix of WIDTH columns; 0 where not `seen`, and beyond WIDTH."""
    inside = seen[:, None] & (columns[None, :] < WIDTH)
    return tl.load(pointer + slots[:, None] * WIDTH + columns[None, :], mask=inside, other=0.0)


@triton.jit
def attend_part(
    query, keys, values, tables, lengths, sums, tops, totals, scale,
    TABLE_STRIDE: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr,
    WIDTH: tl.constexpr, WIDTH_BLOCK: tl.constexpr, VALUE_WIDTH: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """The largest score of a part of a row for each of GROUP heads, and relative to it the sum of exp(score) and of
    exp(score) value."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    first = tl.program_id(2) * SPLIT
    length = tl.load(lengths + row).to(tl.int32)
    low = 0
    if WINDOW > 0:
        low = tl.maximum(length - WINDOW, 0)
    member = tl.arange(0, GROUP_BLOCK)
    query_heads = (row * HEADS + head) * GROUP + member
    columns, value_columns = tl.arange(0, WIDTH_BLOCK), tl.arange(0, VALUE_BLOCK)
    top = tl.full([GROUP_BLOCK], -1e30, tl.float32)
    total = tl.zeros([GROUP_BLOCK], tl.float32)
    acc = tl.zeros([GROUP_BLOCK, VALUE_BLOCK], tl.float32)
    if (first < length) & (first + SPLIT > low):
        queries = load_rows(query, query_heads, member < GROUP, columns, WIDTH)
        for block in range(0, SPLIT, BLOCK):
            start = first + block
            at = start + tl.arange(0, BLOCK)
            seen = (at < length) & (at >= low)
            page = tl.load(tables + row * TABLE_STRIDE + start // PAGE, mask=start < length, other=0).to(tl.int64)
            slots = (page * HEADS + head) * PAGE + start % PAGE + tl.arange(0, BLOCK)
            key = load_rows(keys, slots, seen, columns, WIDTH)
            scores = tl.dot(queries, tl.trans(key), input_precision="ieee") * scale
            if SOFTCAP > 0:
                scores = SOFTCAP * (2 / (1 + tl.exp(-2 * scores / SOFTCAP)) - 1)  # c tanh(score / c)
            scores = tl.where(seen[None, :], scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            factor = tl.exp(top - new_top)
            probs = tl.exp(scores - new_top[:, None])
            value = load_rows(values, slots, seen, value_columns, VALUE_WIDTH)
            total = factor * total + tl.sum(probs, 1)
            acc = factor[:, None] * acc + tl.dot(probs.to(value.dtype), value, input_precision="ieee")
            top = new_top
    part = query_heads * SPLITS + tl.program_id(2)
    tl.store(tops + part, top, mask=member < GROUP)
    tl.store(totals + part, total, mask=member < GROUP)
    inside = (member[:, None] < GROUP) & (value_columns[None, :] < VALUE_WIDTH)
    tl.store(sums + part[:, None] * VALUE_WIDTH + value_columns[None, :], acc, mask=inside)


@triton.jit
def combine_parts(
    sums,
    tops,
    totals,
    sinks,
    output,
    HEADS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """The attention of a query head from its parts, in order."""
    head = tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1)
    columns = tl.arange(0, VALUE_BLOCK)
    top = tl.full([1], -1e30, tl.float32)
    for split in range(0, SPLITS):
        top = tl.maximum(top, tl.load(tops + head * SPLITS + split))
    total = tl.zeros([1], tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + tl.program_id(1)).to(tl.float32)
        top = tl.maximum(top, sink)
        total += tl.exp(sink - top)
    acc = tl.zeros([VALUE_BLOCK], tl.float32)
    for split in range(0, SPLITS):
        part = head * SPLITS + split
        weight = tl.exp(tl.load(tops + part) - top)
        total += weight * tl.load(totals + part)
        acc += weight * tl.load(sums + part * VALUE_WIDTH + columns, mask=columns < VALUE_WIDTH, other=0.0)
    result = (acc / total).to(output.dtype.element_ty)
    tl.store(output + head * VALUE_WIDTH + columns, result, mask=columns < VALUE_WIDTH)
