"""Triton kernels of the gated delta rule's forward; see `chunk_rule` for the formulas and their letters."""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from tinsmith.engine.model.hybrid.rule.blocks import (
    between_of,
    columns_of,
    initial_of,
    numbers_of,
    product,
    scales_of,
    similarity_of,
    store_columns,
    store_square,
    store_state,
    tokens_of,
)


@triton.jit
def corrections_kernel(qkv, decay, beta, tokens, inverse, correction, added, size, KEY_HEADS: tl.constexpr,
                       KEYS: tl.constexpr, HEADS: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr,
                       BLOCK_KEYS: tl.constexpr, BLOCK_VALUES: tl.constexpr):  # fmt: skip
    """T, what it gives for values, and what it gives for keys."""
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEYS + HEADS * VALUES
    token, here = tokens_of(tokens, chunk, size, BLOCK), chunk * HEADS + head
    summed = tl.cumsum(numbers_of(decay, token, head, HEADS), 0)
    strength = numbers_of(beta, token, head, HEADS)
    keys = qkv + (KEY_HEADS + head // (HEADS // KEY_HEADS)) * KEYS
    values = qkv + 2 * KEY_HEADS * KEYS + head * VALUES
    scale = scales_of(keys, chunk, size, KEYS, CHANNELS, BLOCK, BLOCK_KEYS)
    similarity = similarity_of(keys, keys, chunk, size, KEYS, CHANNELS, BLOCK, BLOCK_KEYS)
    similarity *= scale[:, None] * scale[None, :] * between_of(summed, BLOCK)
    at = tl.arange(0, BLOCK)
    system = tl.where(at[:, None] > at[None, :], -similarity * strength[:, None], 0.0)
    solved = system  # T without its diagonal, row by row
    for number in range(1, BLOCK):
        row = tl.sum(tl.where(at[:, None] == number, system, 0.0), 0)
        row += tl.sum(row[:, None] * solved, 0)
        solved = tl.where(at[:, None] == number, row[None, :], solved)
    solved += tl.where(at[:, None] == at[None, :], 1.0, 0.0)
    store_square(inverse, here, size, solved, BLOCK)
    scale *= tl.exp(summed) * strength
    for first in range(0, KEYS, BLOCK_KEYS):
        part = columns_of(keys, chunk, size, first, KEYS, CHANNELS, BLOCK, BLOCK_KEYS) * scale[:, None]
        store_columns(correction, here, size, first, product(solved, part), KEYS, KEYS, BLOCK, BLOCK_KEYS)
    for first in range(0, VALUES, BLOCK_VALUES):
        part = columns_of(values, chunk, size, first, VALUES, CHANNELS, BLOCK, BLOCK_VALUES) * strength[:, None]
        store_columns(added, here, size, first, product(solved, part), VALUES, VALUES, BLOCK, BLOCK_VALUES)


@triton.jit
def scan_kernel(qkv, decay, tokens, initial, final, order, bounds, outside, correction, added, states, size,
                KEY_HEADS: tl.constexpr, KEYS: tl.constexpr, HEADS: tl.constexpr, VALUES: tl.constexpr,
                BLOCK: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_VALUES: tl.constexpr):  # fmt: skip
    """u and the states after the chunks of a tree, from its root on."""
    head, first = tl.program_id(1), tl.program_id(2) * BLOCK_VALUES
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEYS + HEADS * VALUES
    keys = qkv + (KEY_HEADS + head // (HEADS // KEY_HEADS)) * KEYS
    number = tl.load(bounds + tl.program_id(0))
    stop = tl.load(bounds + tl.program_id(0) + 1)
    while number < stop:
        chunk = tl.load(order + number).to(tl.int64)
        before, after = tl.load(initial + chunk).to(tl.int64), tl.load(final + chunk).to(tl.int64)
        token, here = tokens_of(tokens, chunk, size, BLOCK), chunk * HEADS + head
        decays = numbers_of(decay, token, head, HEADS)
        total = tl.sum(decays, 0)
        scale = scales_of(keys, chunk, size, KEYS, CHANNELS, BLOCK, BLOCK_KEYS)
        scale *= tl.exp(total - tl.cumsum(decays, 0))
        new = columns_of(added, here, size, first, VALUES, VALUES, BLOCK, BLOCK_VALUES)
        for key in range(0, KEYS, BLOCK_KEYS):
            state = initial_of(states, outside, before, head, key, first, HEADS, KEYS, VALUES, BLOCK_KEYS, BLOCK_VALUES)
            new -= product(columns_of(correction, here, size, key, KEYS, KEYS, BLOCK, BLOCK_KEYS), state)
        store_columns(added, here, size, first, new, VALUES, VALUES, BLOCK, BLOCK_VALUES)
        for key in range(0, KEYS, BLOCK_KEYS):
            state = initial_of(states, outside, before, head, key, first, HEADS, KEYS, VALUES, BLOCK_KEYS, BLOCK_VALUES)
            written = columns_of(keys, chunk, size, key, KEYS, CHANNELS, BLOCK, BLOCK_KEYS) * scale[:, None]
            state = state * tl.exp(total) + product(tl.trans(written), new)
            store_state(states, after, head, key, first, state, HEADS, KEYS, VALUES, BLOCK_KEYS, BLOCK_VALUES)
        tl.debug_barrier()  # another thread may read what this one wrote
        number += 1


@triton.jit
def outputs_kernel(qkv, decay, tokens, initial, outside, added, states, output, size, KEY_HEADS: tl.constexpr,
                   KEYS: tl.constexpr, HEADS: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr,
                   BLOCK_KEYS: tl.constexpr, BLOCK_VALUES: tl.constexpr):  # fmt: skip
    """o."""
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEYS + HEADS * VALUES
    token = tokens_of(tokens, chunk, size, BLOCK)
    summed = tl.cumsum(numbers_of(decay, token, head, HEADS), 0)
    queries = qkv + head // (HEADS // KEY_HEADS) * KEYS
    keys = queries + KEY_HEADS * KEYS
    scale = scales_of(queries, chunk, size, KEYS, CHANNELS, BLOCK, BLOCK_KEYS) * KEYS**-0.5
    key_scale = scales_of(keys, chunk, size, KEYS, CHANNELS, BLOCK, BLOCK_KEYS)
    attention = similarity_of(queries, keys, chunk, size, KEYS, CHANNELS, BLOCK, BLOCK_KEYS)
    attention *= scale[:, None] * key_scale[None, :] * between_of(summed, BLOCK)
    scale *= tl.exp(summed)
    before = tl.load(initial + chunk).to(tl.int64)
    for first in range(0, VALUES, BLOCK_VALUES):
        new = columns_of(added, chunk * HEADS + head, size, first, VALUES, VALUES, BLOCK, BLOCK_VALUES)
        result = product(attention, new)
        for key in range(0, KEYS, BLOCK_KEYS):
            state = initial_of(states, outside, before, head, key, first, HEADS, KEYS, VALUES, BLOCK_KEYS, BLOCK_VALUES)
            part = columns_of(queries, chunk, size, key, KEYS, CHANNELS, BLOCK, BLOCK_KEYS)
            result += product(part * scale[:, None], state)
        own = first + tl.arange(0, BLOCK_VALUES)[None, :]
        rows = token[:, None].to(tl.int64) * HEADS + head
        tl.store(output + rows * VALUES + own, result, mask=(token >= 0)[:, None] & (own < VALUES))
