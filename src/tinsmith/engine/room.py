"""How much of a sampler's cache a request counts for: the same for who keeps the cache and for who waits for it."""

from __future__ import annotations

from tinsmith.engine.base import SampleRequest

SMALLEST = 64
LONG = 1024
FORESEEN = 64
"""Tokens of an answer for which its row has room from the start; who writes more moves to a larger row."""
FEWEST, WORTH = 3, 3072
"""Answers that go on from one prompt, and tokens that they would have copied of it, to read it together instead."""
ANSWERS = 256
"""In one decoding step; more wait."""


def capacity(length: int) -> int:
    """Of the smallest row for so many tokens: a power of two, or that and some quarters of it more (eighths where it is
    long); 96 above 64."""
    power = max(SMALLEST, 1 << (length - 1).bit_length() >> 1)
    step = max(power // (8 if power >= LONG else 4), SMALLEST // 2)
    return power if length <= power else power + -(-(length - power) // step) * step


def shares(length: int, pieces: int, answers: int) -> bool:
    """Whether so many answers read their prompt together on a CPU. Each piece of it is some calls for every layer of a
    step; on a GPU, where a call costs more than such a read, they never do."""
    return answers >= FEWEST and length * answers >= WORTH * pieces > 0


def room(length: int, answers: int, limit: int, together: bool) -> int:
    """What so many answers of at most `limit` tokens take when they begin, after a prompt of `length` tokens that they
    read together or not."""
    foreseen = min(limit, FORESEEN)
    return length + answers * capacity(foreseen) if together else answers * capacity(length + foreseen)


def room_of(request: SampleRequest) -> int:
    """What all answers of a request take when they begin, as far as the request tells."""
    length, answers = len(request.prompt), request.num_samples
    return room(length, answers, request.max_tokens or FORESEEN, shares(length, 1, answers))
