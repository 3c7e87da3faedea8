"""Two ways of doing the same work, timed in turns, so that a busy minute of the machine slows both.

A ratio is taken for each turn; the median of the turns is what is reported, with the least and the greatest beside it
(5 and 95 % where there are twenty turns or more). A `Line` is one row of the tables that come of it.
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
    """What every part is told.

    Example: Setting(folder=Path("/cache/smollm2"), threads=2, turns=3, dtype="bfloat16")
    """

    folder: Path
    """Of the base model."""
    threads: int
    """Of both sides."""
    turns: int
    """Of long work; what takes milliseconds has ten times as many."""
    dtype: str = "bfloat16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One thing that was measured.

    Example: Line(work="64 samples", baseline="generate", unit="x", least=4.0, aim=5.5, values=[4.8, 5.1, 5.0])
    """

    work: str
    baseline: str
    unit: str
    """Of the values: x (a ratio, baseline by ours in seconds), %, ms, GB, or nothing for a plain number."""
    least: float | None = None
    """What is promised; None where nothing is."""
    aim: float | None = None
    values: list[float]
    """Turn by turn; empty if it could not be measured: `note` says why."""
    ours: str = ""
    theirs: str = ""
    note: str = ""
    lower: bool = False
    """Whether less is better."""

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def spread(self) -> tuple[float, float]:
        """Of all turns, or of 90 % of them where there are many."""
        many = len(self.values) >= 20
        return (percentile(self.values, 0.05), percentile(self.values, 0.95)) if many else _ends(self.values)

    def reaches(self, mark: float | None) -> bool:
        """Whether the median is at `mark` or better."""
        if mark is None or not self.values:
            return False
        return self.median <= mark if self.lower else self.median >= mark

    @property
    def verdict(self) -> str:
        """In a word: how it stands to what is promised."""
        if not self.values:
            return "not measured"
        if self.least is None:
            return ""
        return "aim" if self.reaches(self.aim) else "yes" if self.reaches(self.least) else "no"


@dataclass(slots=True)
class Contest:
    """Seconds of each side, turn by turn. `ratios` are theirs / ours: above 1 we are faster."""

    ours_s: list[float] = field(default_factory=list)
    theirs_s: list[float] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        """Theirs by ours, turn by turn."""
        return [theirs / ours for ours, theirs in zip(self.ours_s, self.theirs_s, strict=True)]

    def line(
        self, work: str, baseline: str, least: float, aim: float, tokens: int | None = None, note: str = ""
    ) -> Line:
        """As a line; with `tokens` the sides are told as tokens/s, else in seconds."""
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
) -> Contest:
    """Both `warm_up` times, then `turns` of each, changing who goes first; `between` after each, and not timed."""
    for _ in range(warm_up):
        for side in (ours, theirs):
            side()
            between()
    found = rotate({"ours": ours, "theirs": theirs}, turns, between)
    return Contest(found["ours"], found["theirs"])


def rotate(
    sides: Mapping[str, Callable[[], object]], turns: int, between: Callable[[], object] = lambda: None
) -> dict[str, list[float]]:
    """Seconds of each side for each turn; forwards in one turn, backwards in the next; `between` after each."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(turns):
        for name in list(sides) if turn % 2 == 0 else reversed(list(sides)):
            found[name].append(timed(sides[name]))
            between()
    return found


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of them lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def timed(work: Callable[[], object]) -> float:
    """Seconds."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _ends(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)


def _speed(seconds: float, tokens: int | None) -> str:
    return f"{tokens / seconds:,.0f} tokens/s" if tokens else f"{seconds:.3g} s"
