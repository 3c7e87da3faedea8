"""How much of a sampler's cache a request counts for: the same for who keeps the cache and for who waits for it."""

from __future__ import annotations

from tinsmith.engine.base import SampleRequest

SMALLEST = 64
FORESEEN = 64
"""Tokens of an answer for which its row has room from the start; who writes more moves to a larger row."""
ANSWERS = 256
"""In one decoding step; more wait."""


def capacity(length: int) -> int:
    """Of the smallest row for so many tokens: a power of two, or that and some quarters of it more; 96 above 64."""
    power = max(SMALLEST, 1 << (length - 1).bit_length() >> 1)
    step = max(power // 4, SMALLEST // 2)
    return power if length <= power else power + -(-(length - power) // step) * step


def room_of(request: SampleRequest) -> int:
    """What all answers of a request take when they begin."""
    return request.num_samples * capacity(len(request.prompt) + min(request.max_tokens or FORESEEN, FORESEEN))
