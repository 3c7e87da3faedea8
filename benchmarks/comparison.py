"""Interleaved timing of two implementations of the same work, so that other load on the machine slows both.

A ratio is taken in each turn; the reported value is the median over the turns, with the smallest and the largest (the
5th and 95th percentiles from twenty turns on). A `Line` is one row of the result tables.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Settings of all parts.

    Example: Setting(folder=Path("/cache/smollm2"), threads=2, turns=3, dtype="bfloat16")
    """

    folder: Path
    """Folder of the base model."""
    threads: int
    """Threads of both sides."""
    turns: int
    """Turns of long work; work of milliseconds has ten times as many."""
    dtype: str = "bfloat16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One measurement.

    Example: Line(work="64 samples", baseline="generate", unit="x", least=4.0, aim=5.5, values=[4.8, 5.1, 5.0])
    """

    work: str
    baseline: str
    unit: str
    """Unit of the values: x (a ratio, seconds of the baseline by ours), %, ms, GB, or empty for a plain number."""
    least: float | None = None
    """The promised value, if there is one."""
    aim: float | None = None
    values: list[float]
    """One value for each turn; empty if it could not be measured, for the reason in `note`."""
    ours: str = ""
    theirs: str = ""
    note: str = ""
    lower: bool = False
    """Whether lower is better."""

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def value_range(self) -> tuple[float, float]:
        """Smallest and largest value, or the 5th and 95th percentiles from twenty turns on."""
        many = len(self.values) >= 20
        return (percentile(self.values, 0.05), percentile(self.values, 0.95)) if many else _ends(self.values)

    def reaches(self, mark: float | None) -> bool:
        """Whether the median is `mark` or better."""
        if mark is None or not self.values:
            return False
        return self.median <= mark if self.lower else self.median >= mark

    @property
    def verdict(self) -> str:
        """The result in relation to the promised value: aim, yes, no, not measured, or empty."""
        if not self.values:
            return "not measured"
        if self.least is None:
            return ""
        return "aim" if self.reaches(self.aim) else "yes" if self.reaches(self.least) else "no"


@dataclass(slots=True)
class Comparison:
    """Seconds of each side, turn by turn."""

    ours_s: list[float] = field(default_factory=list)
    theirs_s: list[float] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        """Theirs divided by ours, turn by turn: above 1, ours is faster."""
        return [theirs / ours for ours, theirs in zip(self.ours_s, self.theirs_s, strict=True)]

    def line(
        self, work: str, baseline: str, least: float, aim: float, tokens: int | None = None, note: str = ""
    ) -> Line:
        """The comparison as a line; the sides are given in tokens/s with `tokens`, else in seconds."""
        sides = [_speed(statistics.median(seconds), tokens) for seconds in (self.ours_s, self.theirs_s)]
        line = Line(
            work=work,
            baseline=baseline,
            unit="x",
            least=least,
            aim=aim,
            values=self.ratios,
            ours=sides[0],
            theirs=sides[1],
            note=note,
        )
        log.info("%s: %.2f %s", work, line.median, [round(value, 2) for value in line.values])
        return line


def in_turns(
    ours: Callable[[], object],
    theirs: Callable[[], object],
    turns: int,
    warm_up: int = 1,
    between: Callable[[], object] = lambda: None,
) -> Comparison:
    """Run both sides `warm_up` times, then time them in `turns`, alternating which goes first. `between` runs untimed
    after each side."""
    for _ in range(warm_up):
        for side in (ours, theirs):
            side()
            between()
    seconds = rotate({"ours": ours, "theirs": theirs}, turns, between)
    return Comparison(seconds["ours"], seconds["theirs"])


def rotate(
    sides: Mapping[str, Callable[[], object]], turns: int, between: Callable[[], object] = lambda: None
) -> dict[str, list[float]]:
    """Seconds of each side for each turn. The order alternates; `between` runs untimed after each side."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(turns):
        for name in list(sides) if turn % 2 == 0 else reversed(list(sides)):
            seconds[name].append(timed(sides[name]))
            between()
    return seconds


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which a `share` of the values lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def timed(work: Callable[[], object]) -> float:
    """Seconds that `work` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _ends(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)


def _speed(seconds: float, tokens: int | None) -> str:
    return f"{tokens / seconds:,.0f} tokens/s" if tokens else f"{seconds:.3g} s"
