"""KV-cache tokens reserved for a request. Shared by the sampler and the admission queue; must not import torch."""

from __future__ import annotations

from math import isqrt

from tinsmith.engine.base import SampleRequest

MIN_CAPACITY = 64
LONG_ROW = 1024
"""Capacities from here on grow in steps of an eighth instead of a quarter."""
MOVE_COST = 40
"""Moving a row to a larger one costs, for each of its tokens, as much as attending over this many unused tokens."""
MIN_SHARED_SEQUENCES, MIN_SHARED_TOKENS = 3, 1024
"""Sequences with one prompt, and copies of prompt tokens between them, from which a shared prompt row pays off."""
PAGE_TOKENS = 64
"""Tokens of a page of the KV cache on a GPU (`paged`)."""
MAX_SEQUENCES = 256
"""Sequences in one decoding step; more wait."""


def row_capacity(length: int) -> int:
    """Capacity of the smallest row that holds `length` tokens: a power of two plus some quarters (eighths in long rows)
    of it; the first ones are 64, 96, 128, 160."""
    power = max(MIN_CAPACITY, 1 << (length - 1).bit_length() >> 1)
    step = max(power // (8 if power >= LONG_ROW else 4), MIN_CAPACITY // 2)
    return power if length <= power else power + -(-(length - power) // step) * step


def prefix_capacity(length: int) -> int:
    """Capacity of a shared prompt row: a power of two or three quarters of one. There are few sizes because rows of one
    size are read with one call."""
    power = max(MIN_CAPACITY, 1 << (length - 1).bit_length())
    return power // 4 * 3 if power > MIN_CAPACITY and length <= power // 4 * 3 else power


def headroom(length: int, remaining: int) -> int:
    """Free tokens to reserve in a row of `length` tokens that may grow by `remaining`: less means more moves, more
    means more unused tokens read in each step. The sum of both costs is least where they are equal."""
    return min(remaining, max(MIN_CAPACITY, isqrt(MOVE_COST * length)))


def shares_prompt(length: int, sequences: int) -> bool:
    """Whether sequences read a prompt of `length` tokens from a shared row on a CPU. On a GPU they never do: there a
    call costs more than reading the copies."""
    return sequences >= MIN_SHARED_SEQUENCES and length * sequences >= MIN_SHARED_TOKENS


def paged_tokens(length: int, sequences: int, max_tokens: int) -> int:
    """Cache tokens that sequences reserve in pages: full pages of their prompt are shared, the rest is their own."""
    shared = length // PAGE_TOKENS * PAGE_TOKENS
    own = -(-(length - shared + headroom(length, max_tokens)) // PAGE_TOKENS) * PAGE_TOKENS
    return shared + sequences * own


def reserved_tokens(length: int, sequences: int, max_tokens: int, *, shared: bool, state_tokens: int = 0) -> int:
    """Cache tokens that sequences of at most `max_tokens` reserve when they start, after a prompt of `length` tokens
    that they share or copy. `state_tokens`: what the recurrent states of each are worth."""
    if shared:
        return prefix_capacity(length) + sequences * (row_capacity(headroom(0, max_tokens)) + state_tokens)
    return sequences * (row_capacity(length + headroom(length, max_tokens)) + state_tokens)


def cache_reserve(request: SampleRequest, state_tokens: int = 0) -> int:
    """Cache tokens that all sequences of a request reserve when they start, as far as the request tells."""
    length, sequences = len(request.prompt), request.num_samples
    shared = shares_prompt(length, sequences)
    max_tokens = request.max_tokens or MIN_CAPACITY
    return reserved_tokens(length, sequences, max_tokens, shared=shared, state_tokens=state_tokens)
