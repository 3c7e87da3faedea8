"""Two ways of doing the same work, timed in turns, so that a busy minute of the machine slows both.

A ratio is taken for each turn; the median of the turns is what is reported, with the least and the greatest beside it.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """What was measured. `ratios` are theirs / ours in seconds: above 1 we are faster.

    Example: Contest(name="sampling", work="4096 tokens", ours_s=[2.0, 2.1], theirs_s=[5.0, 5.1], wanted=2.0)
    """

    name: str
    work: str
    tokens: int
    wanted: float | None
    """The least ratio that is promised; None where nothing is."""
    ours_s: list[float] = field(default_factory=list)
    theirs_s: list[float] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        """Theirs by ours, turn by turn."""
        return [theirs / ours for ours, theirs in zip(self.ours_s, self.theirs_s, strict=True)]

    def row(self) -> str:
        """As a line of a markdown table."""
        ours, theirs = (self.tokens / statistics.median(seconds) for seconds in (self.ours_s, self.theirs_s))
        ratios = self.ratios
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        wanted = "" if self.wanted is None else f"{self.wanted:g}"
        return f"| {self.name} | {self.work} | {ours:,.0f} | {theirs:,.0f} | {spread} | {wanted} |"


HEADER = (
    "| what | work | ours, tokens/s | theirs, tokens/s | ratio, median (spread) | promised |\n|---|---|---|---|---|---|"
)


def in_turns(contest: Contest, ours: Callable[[], object], theirs: Callable[[], object], turns: int) -> Contest:
    """Both once to warm up, then `turns` of each, changing who goes first; returns the contest with its times."""
    for warm_up in (ours, theirs):
        warm_up()
    for turn in range(turns):
        sides = ((ours, contest.ours_s), (theirs, contest.theirs_s))
        for work, seconds in sides if turn % 2 == 0 else sides[::-1]:
            seconds.append(_timed(work))
    log.info(contest.row())
    return contest


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of them lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
