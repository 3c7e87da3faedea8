"""Questions that should be certain or hopeless, with a stated confidence: a check that the policy tells them apart.

`easy` are sums and differences of single digits, `copies` strings of letters to repeat, and `hard` products of numbers
of nine digits. Rewards and metrics are those of `self_prediction`, with accuracy and confidence of each kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from string import ascii_lowercase
from typing import Literal

from pydantic import Field
from typing_extensions import override

from tinsmith.integrations.minds.introspection.self_prediction import StatedConfidence
from tinsmith.rl.types import Task

_DIGITS = range(10)
_LENGTHS = (8, 12)
_HARD = (10**8, 10**9 - 1)


class SanityCheck(StatedConfidence):
    """Questions that are easy or hopeless; the policy answers and states how likely its answer is right."""

    type: Literal["sanity_check"] = "sanity_check"
    easy: int = Field(default=30, ge=0, le=100)
    """Number of sums and differences of single digits."""
    copies: int = Field(default=30, ge=0)
    """Number of strings of letters to repeat."""
    hard: int = Field(default=60, ge=0)
    """Number of products of numbers of nine digits."""
    held_out: int | None = Field(default=120, ge=0)
    """Number of questions that are held out for evaluation; 0: none."""

    @override
    def tasks(self) -> Sequence[Task]:
        draw = Random(f"sanity_check/{self.seed}")
        kinds = {"easy": _easy(draw, self.easy), "copy": _copies(draw, self.copies), "hard": _hard(draw, self.hard)}
        return [
            self.question(f"sanity_check/{kind}/{number}", text, answer, kind)
            for kind, questions in kinds.items()
            for number, (text, answer) in enumerate(questions)
        ]


def _easy(draw: Random, count: int) -> Iterator[tuple[str, str]]:
    pairs = [(a, b) for a in _DIGITS for b in _DIGITS]
    for a, b in draw.sample(pairs, count):
        yield draw.choice(((f"What is {a} + {b}?", str(a + b)), (f"What is {a} - {b}?", str(a - b))))


def _copies(draw: Random, count: int) -> Iterator[tuple[str, str]]:
    for _ in range(count):
        text = "".join(draw.choices(ascii_lowercase, k=draw.randint(*_LENGTHS)))
        yield f"Repeat these letters exactly: {text}", text


def _hard(draw: Random, count: int) -> Iterator[tuple[str, str]]:
    for _ in range(count):
        a, b = draw.randint(*_HARD), draw.randint(*_HARD)
        yield f"What is {a} * {b}?", str(a * b)
