"""What the Triton kernels of the gated delta rule load, store and multiply."""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from tinsmith.engine.model.hybrid.chunk_rule import MIN_DECAY, NORM_EPS

EPS = tl.constexpr(NORM_EPS)
LEAST = tl.constexpr(MIN_DECAY)


@triton.jit
def product(left, right):
    """A product of float32."""
    return tl.dot(left, right, input_precision="tf32x3")


@triton.jit
def columns_of(rows, chunk, size, first, WIDTH: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr,
               PART: tl.constexpr):  # fmt: skip
    """[BLOCK, PART]: columns of a chunk's rows, which are STRIDE apart; zeros beyond `size` and WIDTH."""
    row, column = tl.arange(0, BLOCK)[:, None], first + tl.arange(0, PART)[None, :]
    mask = (row < size) & (column < WIDTH)
    return tl.load(rows + (chunk * size + row) * STRIDE + column, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def token_columns(rows, token, head, first, HEADS: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr):
    """[BLOCK, PART]: columns of a head of [C, HEADS, WIDTH] at a chunk's tokens; zeros for padding."""
    column = first + tl.arange(0, PART)[None, :]
    at = rows + (token[:, None].to(tl.int64) * HEADS + head) * WIDTH + column
    return tl.load(at, mask=(token >= 0)[:, None] & (column < WIDTH), other=0.0).to(tl.float32)


@triton.jit
def scales_of(rows, chunk, size, WIDTH: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr):
    """[BLOCK]: 1 / the lengths of a chunk's rows."""
    squares = tl.zeros([BLOCK], tl.float32)
    for first in range(0, WIDTH, PART):
        raw = columns_of(rows, chunk, size, first, WIDTH, STRIDE, BLOCK, PART)
        squares += tl.sum(raw * raw, 1)
    return tl.rsqrt(squares + EPS)


@triton.jit
def similarity_of(left, right, chunk, size, WIDTH: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr,
                  PART: tl.constexpr):  # fmt: skip
    """[BLOCK, BLOCK]: products of a chunk's rows with others of it."""
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    for first in range(0, WIDTH, PART):
        rows = columns_of(left, chunk, size, first, WIDTH, STRIDE, BLOCK, PART)
        others = columns_of(right, chunk, size, first, WIDTH, STRIDE, BLOCK, PART)
        total += product(rows, tl.trans(others))
    return total


@triton.jit
def state_of(states, number, head, key, value, HEADS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
             BLOCK_KEYS: tl.constexpr, BLOCK_VALUES: tl.constexpr):  # fmt: skip
    """[BLOCK_KEYS, BLOCK_VALUES]: a part of a head's state; zeros for a negative number."""
    row, column = key + tl.arange(0, BLOCK_KEYS)[:, None], value + tl.arange(0, BLOCK_VALUES)[None, :]
    at = states + ((number * HEADS + head) * KEYS + row) * VALUES + column
    return tl.load(at, mask=(row < KEYS) & (column < VALUES) & (number >= 0), other=0.0)


@triton.jit
def initial_of(states, outside, number, head, key, value, HEADS: tl.constexpr, KEYS: tl.constexpr,
               VALUES: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_VALUES: tl.constexpr):  # fmt: skip
    """The same of an initial state: 0, 1, ... within the pass, -2, -3, ... outside, -1 for zeros."""
    source = outside if number < 0 else states
    number = tl.where(number < 0, -2 - number, number)
    return state_of(source, number, head, key, value, HEADS, KEYS, VALUES, BLOCK_KEYS, BLOCK_VALUES)


@triton.jit
def store_state(states, number, head, key, value, part, HEADS: tl.constexpr, KEYS: tl.constexpr,
                VALUES: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_VALUES: tl.constexpr):  # fmt: skip
    """Write what `state_of` reads; nothing for a negative number."""
    row, column = key + tl.arange(0, BLOCK_KEYS)[:, None], value + tl.arange(0, BLOCK_VALUES)[None, :]
    at = states + ((number * HEADS + head) * KEYS + row) * VALUES + column
    tl.store(at, part, mask=(row < KEYS) & (column < VALUES) & (number >= 0))


@triton.jit
def store_columns(rows, chunk, size, first, part, WIDTH: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr,
                  PART: tl.constexpr):  # fmt: skip
    """Write what `columns_of` reads."""
    row, column = tl.arange(0, BLOCK)[:, None], first + tl.arange(0, PART)[None, :]
    at = rows + (chunk * size + row) * STRIDE + column
    tl.store(at, part.to(rows.dtype.element_ty), mask=(row < size) & (column < WIDTH))


@triton.jit
def tokens_of(tokens, chunk, size, BLOCK: tl.constexpr):
    """[BLOCK]: a chunk's tokens; -1 for padding."""
    at = tl.arange(0, BLOCK)
    return tl.load(tokens + chunk * size + at, mask=at < size, other=-1)


@triton.jit
def numbers_of(numbers, token, head, HEADS: tl.constexpr):
    """[BLOCK]: a head's numbers of the tokens; 0 for padding."""
    return tl.load(numbers + token.to(tl.int64) * HEADS + head, mask=token >= 0, other=0.0).to(tl.float32)


@triton.jit
def store_numbers(numbers, token, head, values, HEADS: tl.constexpr):
    """Write what `numbers_of` reads."""
    tl.store(numbers + token.to(tl.int64) * HEADS + head, values, mask=token >= 0)


@triton.jit
def between_of(summed, BLOCK: tl.constexpr):
    """[BLOCK, BLOCK]: D."""
    at = tl.arange(0, BLOCK)
    gaps = tl.minimum(tl.maximum(summed[:, None] - summed[None, :], LEAST), 0.0)
    return tl.where(at[:, None] >= at[None, :], tl.exp(gaps), 0.0)


@triton.jit
def square_of(squares, number, size, BLOCK: tl.constexpr):
    """[BLOCK, BLOCK]: a matrix of [..., size, size]; zeros beyond `size`."""
    row, column = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    mask = (row < size) & (column < size)
    return tl.load(squares + (number * size + row) * size + column, mask=mask, other=0.0)


@triton.jit
def store_square(squares, number, size, square, BLOCK: tl.constexpr):
    """Write what `square_of` reads."""
    row, column = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    mask = (row < size) & (column < size)
    tl.store(squares + (number * size + row) * size + column, square, mask=mask)
