"""How much of a sampler's cache a request counts for: the same for who keeps the cache and for who waits for it."""

from __future__ import annotations

from tinsmith.engine.base import SampleRequest

SMALLEST = 64
FORESEEN = 64
"""Tokens of an answer for which its row has room from the start; who writes more moves to a larger row."""
FEWEST, WORTH = 3, 2048
"""Answers that go on from one prompt, and tokens that they would have copied of it, to read it together instead."""
ANSWERS = 256
"""In one decoding step; more wait."""


def capacity(length: int) -> int:
    """Of the smallest row for so many tokens: a power of two, or that and some quarters of it more; 96 above 64."""
    power = max(SMALLEST, 1 << (length - 1).bit_length() >> 1)
    step = max(power // 4, SMALLEST // 2)
    return power if length <= power else power + -(-(length - power) // step) * step


def shares(length: int, pieces: int, answers: int) -> bool:
    """Whether so many answers read their prompt together on a CPU. Each piece of it is some calls for every layer of a
    step; on a GPU, where a call costs more than such a read, they never do."""
    return answers >= FEWEST and length * answers >= WORTH * pieces > 0


def room_of(request: SampleRequest) -> int:
    """What all answers of a request take when they begin."""
    return request.num_samples * capacity(len(request.prompt) + min(request.max_tokens or FORESEEN, FORESEEN))
