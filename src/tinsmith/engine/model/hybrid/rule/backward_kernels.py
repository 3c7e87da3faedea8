"""Triton kernels of the gated delta rule's backward; see `chunk_rule` for the formulas and their letters."""

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
    square_of,
    state_of,
    store_columns,
    store_numbers,
    store_square,
    store_state,
    token_columns,
    tokens_of,
)


@triton.jit
def added_gradients_kernel(qkv, decay, tokens, grad, of_added, size, KEY_HEADS: tl.constexpr, KEYS: tl.constexpr,
                           HEADS: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr,
                           BLOCK_KEYS: tl.constexpr, BLOCK_VALUES: tl.constexpr):  # fmt: skip
    """The gradient of u by the chunk's outputs."""
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEYS + HEADS * VALUES
    token, here = tokens_of(tokens, chunk, size, BLOCK), chunk * HEADS + head
    summed = tl.cumsum(numbers_of(decay, token, head, HEADS), 0)
    queries = qkv + head // (HEADS // KEY_HEADS) * KEYS
    keys = queries + KEY_HEADS * KEYS
    scale = scales_of(queries, chunk, size, KEYS, CHANNELS, BLOCK, BLOCK_KEYS) * KEYS**-0.5
    key_scale = scales_of(keys, chunk, size, KEYS, CHANNELS, BLOCK, BLOCK_KEYS)
    attention = similarity_of(queries, keys, chunk, size, KEYS, CHANNELS, BLOCK, BLOCK_KEYS)
    attention = tl.trans(attention * scale[:, None] * key_scale[None, :] * between_of(summed, BLOCK))
    for first in range(0, VALUES, BLOCK_VALUES):
        part = product(attention, token_columns(grad, token, head, first, HEADS, VALUES, BLOCK_VALUES))
        store_columns(of_added, here, size, first, part, VALUES, VALUES, BLOCK, BLOCK_VALUES)


@triton.jit
def scan_gradients_kernel(qkv, decay, tokens, initial, final, order, bounds, correction, grad, of_added, after, size,
                          KEY_HEADS: tl.constexpr, KEYS: tl.constexpr, HEADS: tl.constexpr, VALUES: tl.constexpr,
                          BLOCK: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_VALUES: tl.constexpr):  # fmt: skip
    """The gradients of u and of the states after the chunks of a tree, from its leaves on."""
    head, first = tl.program_id(1), tl.program_id(2) * BLOCK_VALUES
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEYS + HEADS * VALUES
    queries = qkv + head // (HEADS // KEY_HEADS) * KEYS
    keys = queries + KEY_HEADS * KEYS
    number = tl.load(bounds + tl.program_id(0) + 1) - 1
    start = tl.load(bounds + tl.program_id(0))
    while number >= start:
        chunk = tl.load(order + number).to(tl.int64)
        before, end = tl.load(initial + chunk).to(tl.int64), tl.load(final + chunk).to(tl.int64)
        token, here = tokens_of(tokens, chunk, size, BLOCK), chunk * HEADS + head
        decays = numbers_of(decay, token, head, HEADS)
        summed, total = tl.cumsum(decays, 0), tl.sum(decays, 0)
        scale = scales_of(queries, chunk, size, KEYS, CHANNELS, BLOCK, BLOCK_KEYS) * KEYS**-0.5 * tl.exp(summed)
        key_scale = scales_of(keys, chunk, size, KEYS, CHANNELS, BLOCK, BLOCK_KEYS) * tl.exp(total - summed)
        new = columns_of(of_added, here, size, first, VALUES, VALUES, BLOCK, BLOCK_VALUES)
        for key in range(0, KEYS, BLOCK_KEYS):
            state = state_of(after, end, head, key, first, HEADS, KEYS, VALUES, BLOCK_KEYS, BLOCK_VALUES)
            written = columns_of(keys, chunk, size, key, KEYS, CHANNELS, BLOCK, BLOCK_KEYS)
            new += product(written * key_scale[:, None], state)
        store_columns(of_added, here, size, first, new, VALUES, VALUES, BLOCK, BLOCK_VALUES)
        grads = token_columns(grad, token, head, first, HEADS, VALUES, BLOCK_VALUES)
        for key in range(0, KEYS, BLOCK_KEYS):
            state = state_of(after, end, head, key, first, HEADS, KEYS, VALUES, BLOCK_KEYS, BLOCK_VALUES)
            state *= tl.exp(total)
            state += state_of(after, before, head, key, first, HEADS, KEYS, VALUES, BLOCK_KEYS, BLOCK_VALUES)
            part = columns_of(queries, chunk, size, key, KEYS, CHANNELS, BLOCK, BLOCK_KEYS) * scale[:, None]
            state += product(tl.trans(part), grads)
            part = columns_of(correction, here, size, key, KEYS, KEYS, BLOCK, BLOCK_KEYS)
            state -= product(tl.trans(part), new)
            store_state(after, before, head, key, first, state, HEADS, KEYS, VALUES, BLOCK_KEYS, BLOCK_VALUES)
        tl.debug_barrier()  # another thread may read what this one wrote
        number -= 1


@triton.jit
def value_gradients_kernel(qkv, beta, tokens, inverse, added, grad, of_added, wanted, qkv_grad, products, beta_grad,
                           size, KEY_HEADS: tl.constexpr, KEYS: tl.constexpr, HEADS: tl.constexpr,
                           VALUES: tl.constexpr, BLOCK: tl.constexpr, BLOCK_KEYS: tl.constexpr,
                           BLOCK_VALUES: tl.constexpr):  # fmt: skip
    """The gradients of b (v - e K S), of values, of (q_i . k_j) D_ij and of the triangular system, and a part of that
    of beta."""
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEYS + HEADS * VALUES
    token, here = tokens_of(tokens, chunk, size, BLOCK), chunk * HEADS + head
    strength = numbers_of(beta, token, head, HEADS)
    attention, system = tl.zeros([BLOCK, BLOCK], tl.float32), tl.zeros([BLOCK, BLOCK], tl.float32)
    of_beta, first_value = tl.zeros([BLOCK], tl.float32), 2 * KEY_HEADS * KEYS + head * VALUES
    for first in range(0, VALUES, BLOCK_VALUES):
        turned = tl.trans(square_of(inverse, here, size, BLOCK))  # loaded again: registers are few
        part = product(turned, columns_of(of_added, here, size, first, VALUES, VALUES, BLOCK, BLOCK_VALUES))
        store_columns(wanted, here, size, first, part, VALUES, VALUES, BLOCK, BLOCK_VALUES)
        new = tl.trans(columns_of(added, here, size, first, VALUES, VALUES, BLOCK, BLOCK_VALUES))
        system -= product(part, new)
        attention += product(token_columns(grad, token, head, first, HEADS, VALUES, BLOCK_VALUES), new)
        values = columns_of(qkv + first_value, chunk, size, first, VALUES, CHANNELS, BLOCK, BLOCK_VALUES)
        of_beta += tl.sum(part * values, 1)
        part *= strength[:, None]
        store_columns(qkv_grad + first_value, chunk, size, first, part, VALUES, CHANNELS, BLOCK, BLOCK_VALUES)
    store_square(products, 2 * here, size, attention, BLOCK)
    store_square(products, 2 * here + 1, size, system, BLOCK)
    store_numbers(beta_grad, token, head, of_beta, HEADS)


@triton.jit
def product_gradients_kernel(qkv, decay, beta, tokens, products, decay_grad, beta_grad, size, KEY_HEADS: tl.constexpr,
                             KEYS: tl.constexpr, HEADS: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr,
                             BLOCK_KEYS: tl.constexpr, BLOCK_VALUES: tl.constexpr):  # fmt: skip
    """The gradients of q_i . k_j and k_i . k_j, and what comes from D to those of the summed decays and of beta."""
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEYS + HEADS * VALUES
    at = tl.arange(0, BLOCK)
    token, here = tokens_of(tokens, chunk, size, BLOCK), chunk * HEADS + head
    summed = tl.cumsum(numbers_of(decay, token, head, HEADS), 0)
    strength = numbers_of(beta, token, head, HEADS)
    queries = qkv + head // (HEADS // KEY_HEADS) * KEYS
    keys = queries + KEY_HEADS * KEYS
    scale = scales_of(queries, chunk, size, KEYS, CHANNELS, BLOCK, BLOCK_KEYS) * KEYS**-0.5
    key_scale = scales_of(keys, chunk, size, KEYS, CHANNELS, BLOCK, BLOCK_KEYS)
    relative = similarity_of(keys, keys, chunk, size, KEYS, CHANNELS, BLOCK, BLOCK_KEYS)
    relative *= key_scale[:, None] * key_scale[None, :]
    system = tl.where(at[:, None] > at[None, :], between_of(summed, BLOCK), 0.0)
    system *= square_of(products, 2 * here + 1, size, BLOCK)
    tl.debug_barrier()  # another thread may still read what this one changes
    store_square(products, 2 * here + 1, size, system * strength[:, None], BLOCK)
    relative *= system
    of_beta = tl.sum(relative, 1)
    relative *= strength[:, None]
    of_summed = tl.sum(relative, 1) - tl.sum(relative, 0)
    relative = similarity_of(queries, keys, chunk, size, KEYS, CHANNELS, BLOCK, BLOCK_KEYS)
    relative *= scale[:, None] * key_scale[None, :]
    attention = square_of(products, 2 * here, size, BLOCK) * between_of(summed, BLOCK)
    relative *= attention
    of_summed += tl.sum(relative, 1) - tl.sum(relative, 0)
    of_beta += numbers_of(beta_grad, token, head, HEADS)
    tl.debug_barrier()  # another thread may still read what this one changes
    store_square(products, 2 * here, size, attention, BLOCK)
    store_numbers(decay_grad, token, head, of_summed, HEADS)
    store_numbers(beta_grad, token, head, of_beta, HEADS)


@triton.jit
def state_gradients_kernel(qkv, decay, beta, tokens, initial, final, outside, added, states, grad, wanted, after,
                           units_grad, decay_grad, beta_grad, size, KEY_HEADS: tl.constexpr, KEYS: tl.constexpr,
                           HEADS: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr, BLOCK_KEYS: tl.constexpr,
                           BLOCK_VALUES: tl.constexpr):  # fmt: skip
    """What states give to the gradients of a value head's normalized queries and keys, and the gradients of decays and
    beta."""
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEYS + HEADS * VALUES
    token, here = tokens_of(tokens, chunk, size, BLOCK), chunk * HEADS + head
    decays, strength = numbers_of(decay, token, head, HEADS), numbers_of(beta, token, head, HEADS)
    summed, total = tl.cumsum(decays, 0), tl.sum(decays, 0)
    before, end = tl.load(initial + chunk).to(tl.int64), tl.load(final + chunk).to(tl.int64)
    queries = qkv + head // (HEADS // KEY_HEADS) * KEYS
    keys = queries + KEY_HEADS * KEYS
    by_query, by_key = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    along, last = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK_KEYS], tl.float32)
    for key in range(0, KEYS, BLOCK_KEYS):
        queried, read = tl.zeros([BLOCK, BLOCK_KEYS], tl.float32), tl.zeros([BLOCK, BLOCK_KEYS], tl.float32)
        written = tl.zeros([BLOCK, BLOCK_KEYS], tl.float32)
        for first in range(0, VALUES, BLOCK_VALUES):
            state = initial_of(states, outside, before, head, key, first, HEADS, KEYS, VALUES, BLOCK_KEYS, BLOCK_VALUES)
            ends = state_of(after, end, head, key, first, HEADS, KEYS, VALUES, BLOCK_KEYS, BLOCK_VALUES)
            last += tl.sum(ends * state, 1)
            state = tl.trans(state)
            queried += product(token_columns(grad, token, head, first, HEADS, VALUES, BLOCK_VALUES), state)
            read -= product(columns_of(wanted, here, size, first, VALUES, VALUES, BLOCK, BLOCK_VALUES), state)
            new = columns_of(added, here, size, first, VALUES, VALUES, BLOCK, BLOCK_VALUES)
            written += product(new, tl.trans(ends))
        queried, read = queried * tl.exp(summed)[:, None], read * tl.exp(summed)[:, None]
        written *= tl.exp(total - summed)[:, None]
        raw = columns_of(queries, chunk, size, key, KEYS, CHANNELS, BLOCK, BLOCK_KEYS)
        by_query += tl.sum(queried * raw, 1)
        raw = columns_of(keys, chunk, size, key, KEYS, CHANNELS, BLOCK, BLOCK_KEYS)
        by_key += tl.sum(read * raw, 1)
        along += tl.sum(written * raw, 1)
        written += read * strength[:, None]
        store_columns(units_grad, here, size, key, queried, KEYS, 2 * KEYS, BLOCK, BLOCK_KEYS)
        store_columns(units_grad + KEYS, here, size, key, written, KEYS, 2 * KEYS, BLOCK, BLOCK_KEYS)
    scale = scales_of(keys, chunk, size, KEYS, CHANNELS, BLOCK, BLOCK_KEYS)
    by_key, along = by_key * scale, along * scale
    scale = scales_of(queries, chunk, size, KEYS, CHANNELS, BLOCK, BLOCK_KEYS) * KEYS**-0.5
    of_summed = numbers_of(decay_grad, token, head, HEADS) + by_query * scale + by_key * strength - along
    of_beta = numbers_of(beta_grad, token, head, HEADS) + by_key
    # Every decay of the chunk is in the last sum, and in those from its own token on.
    of_decay = tl.cumsum(of_summed, 0, reverse=True) + tl.sum(last, 0) * tl.exp(total) + tl.sum(along, 0)
    tl.debug_barrier()  # another thread may still read what this one changes
    store_numbers(decay_grad, token, head, of_decay, HEADS)
    store_numbers(beta_grad, token, head, of_beta, HEADS)


@triton.jit
def unit_gradients_kernel(qkv, products, units_grad, size, KEY_HEADS: tl.constexpr, KEYS: tl.constexpr,
                          HEADS: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr, BLOCK_KEYS: tl.constexpr,
                          BLOCK_VALUES: tl.constexpr):  # fmt: skip
    """Some columns of the gradients of a value head's normalized queries and keys: what comes from their products is
    added."""
    chunk, head, key = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) * BLOCK_KEYS
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEYS + HEADS * VALUES
    here = chunk * HEADS + head
    queries = qkv + head // (HEADS // KEY_HEADS) * KEYS
    keys = queries + KEY_HEADS * KEYS
    scale = scales_of(keys, chunk, size, KEYS, CHANNELS, BLOCK, BLOCK_KEYS)
    unit = columns_of(keys, chunk, size, key, KEYS, CHANNELS, BLOCK, BLOCK_KEYS) * scale[:, None]
    total = columns_of(units_grad, here, size, key, KEYS, 2 * KEYS, BLOCK, BLOCK_KEYS)
    total += product(square_of(products, 2 * here, size, BLOCK), unit)
    store_columns(units_grad, here, size, key, total, KEYS, 2 * KEYS, BLOCK, BLOCK_KEYS)
    scale = scales_of(queries, chunk, size, KEYS, CHANNELS, BLOCK, BLOCK_KEYS) * KEYS**-0.5
    query = columns_of(queries, chunk, size, key, KEYS, CHANNELS, BLOCK, BLOCK_KEYS) * scale[:, None]
    total = columns_of(units_grad + KEYS, here, size, key, KEYS, 2 * KEYS, BLOCK, BLOCK_KEYS)
    total += product(tl.trans(square_of(products, 2 * here, size, BLOCK)), query)
    system = square_of(products, 2 * here + 1, size, BLOCK)
    total += product(system + tl.trans(system), unit)
    store_columns(units_grad + KEYS, here, size, key, total, KEYS, 2 * KEYS, BLOCK, BLOCK_KEYS)


@triton.jit
def norm_gradients_kernel(qkv, units_grad, qkv_grad, size, KEY_HEADS: tl.constexpr, KEYS: tl.constexpr,
                          HEADS: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr, BLOCK_KEYS: tl.constexpr,
                          BLOCK_VALUES: tl.constexpr):  # fmt: skip
    """The gradient of a key head's raw queries, or of its keys, from those of its value heads."""
    chunk, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEYS + HEADS * VALUES
    SHARING: tl.constexpr = HEADS // KEY_HEADS
    columns = (part * KEY_HEADS + head) * KEYS
    scale = scales_of(qkv + columns, chunk, size, KEYS, CHANNELS, BLOCK, BLOCK_KEYS)
    factor = scale * tl.where(part == 0, KEYS**-0.5, 1.0)
    along = tl.zeros([BLOCK], tl.float32)
    for first in range(0, KEYS, BLOCK_KEYS):
        raw = columns_of(qkv + columns, chunk, size, first, KEYS, CHANNELS, BLOCK, BLOCK_KEYS)
        for number in range(SHARING):
            here = chunk * HEADS + head * SHARING + number
            grads = columns_of(units_grad + part * KEYS, here, size, first, KEYS, 2 * KEYS, BLOCK, BLOCK_KEYS)
            along += tl.sum(grads * raw, 1)
    along *= scale * scale
    for first in range(0, KEYS, BLOCK_KEYS):
        raw = columns_of(qkv + columns, chunk, size, first, KEYS, CHANNELS, BLOCK, BLOCK_KEYS)
        total = -raw * along[:, None]
        for number in range(SHARING):
            here = chunk * HEADS + head * SHARING + number
            total += columns_of(units_grad + part * KEYS, here, size, first, KEYS, 2 * KEYS, BLOCK, BLOCK_KEYS)
        total *= factor[:, None]
        store_columns(qkv_grad + columns, chunk, size, first, total, KEYS, CHANNELS, BLOCK, BLOCK_KEYS)
