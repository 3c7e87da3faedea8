"""Records of the check: a step, the marks that its values must reach, and what came out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.gpu_check.shapes import Size

Values = Mapping[str, Any]
"""Measured values by name: numbers, texts, or lists of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A bound of one value."""

    value: str
    least: float | None = None
    most: float | None = None
    tiny: bool = False
    """Whether the mark holds with tiny shapes on a CPU too: marks of correctness do, marks of speed do not."""

    def missed_by(self, values: Values) -> str:
        """The sentence about a missed mark; empty if the value reaches it."""
        if self.value not in values:
            return f"{self.value} was not measured"
        value = float(values[self.value])
        if self.least is not None and not value >= self.least:
            return f"{self.value} is {value:.4g}, at least {self.least:g} is needed"
        if self.most is not None and not value <= self.most:
            return f"{self.value} is {value:.4g}, at most {self.most:g} is allowed"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of the check, which runs in a process of its own."""

    number: int
    name: str
    limit_s: float
    """Seconds after which the process is killed."""
    measure: Callable[[Size], Values]
    marks: tuple[Mark, ...] = ()

    def missed(self, values: Values, *, tiny: bool) -> list[str]:
        """Sentences about the marks that `values` do not reach."""
        sentences = (mark.missed_by(values) for mark in self.marks if mark.tiny or not tiny)
        return [sentence for sentence in sentences if sentence]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a step gave: one line of the JSON file."""

    step: int
    name: str
    ok: bool
    seconds: float
    values: Values = field(default_factory=dict)
    missed: list[str] = field(default_factory=list)
    error: str = ""

    def to_json(self) -> dict[str, Any]:
        """The outcome as a JSON object."""
        return asdict(self)
