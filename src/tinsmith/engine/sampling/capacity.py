"""How much of a sampler's cache a request counts for: the same for who keeps the cache and for who waits for it."""

from __future__ import annotations

from math import isqrt

from tinsmith.engine.base import SampleRequest

SMALLEST = 64
LONG = 1024
MOVED = 40
"""A row that moves to a larger one costs for each of its tokens as much as it does to read so many idle ones."""
FEWEST, WORTH = 3, 1024
"""Answers that go on from one prompt, and tokens that they would have copied of it, to read it together instead."""
ANSWERS = 256
"""In one decoding step; more wait."""


def capacity(length: int) -> int:
    """Of the smallest row for so many tokens: a power of two, or that and some quarters of it more (eighths where it is
    long); 96 above 64."""
    power = max(SMALLEST, 1 << (length - 1).bit_length() >> 1)
    step = max(power // (8 if power >= LONG else 4), SMALLEST // 2)
    return power if length <= power else power + -(-(length - power) // step) * step


def stem(length: int) -> int:
    """Of the row of a prompt that several answers read, a power of two or three quarters of one: few sizes, since those
    of one size are read with one call."""
    power = max(SMALLEST, 1 << (length - 1).bit_length())
    return power // 4 * 3 if power > SMALLEST and length <= power // 4 * 3 else power


def ahead(length: int, left: int) -> int:
    """For how many of `left` further tokens a row of so many has room: who says more moves, who says less reads idle
    tokens in each step. It costs least where both cost alike."""
    return min(left, max(SMALLEST, isqrt(MOVED * length)))


def shares(length: int, answers: int) -> bool:
    """Whether so many answers read their prompt together on a CPU; on a GPU, where a call costs more than such a read,
    they never do."""
    return answers >= FEWEST and length * answers >= WORTH


def room(length: int, answers: int, limit: int, together: bool) -> int:
    """What so many answers of at most `limit` tokens take when they begin, after a prompt of `length` tokens that they
    read together or not."""
    if together:
        return stem(length) + answers * capacity(ahead(0, limit))
    return answers * capacity(length + ahead(length, limit))


def room_of(request: SampleRequest) -> int:
    """What all answers of a request take when they begin, as far as the request tells."""
    length, answers = len(request.prompt), request.num_samples
    return room(length, answers, request.max_tokens or SMALLEST, shares(length, answers))
