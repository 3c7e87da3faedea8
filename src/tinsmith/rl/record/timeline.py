"""What a run did when: timeline.jsonl of the run folder, its chart in the report, and the share of overlap.

A line has a `step`, a `part` (sampling, training, publishing, evaluation or saving), and `begin` and `end` as Unix time
in seconds. Sampling of a step is that of its batch.

Example: {"step": 3, "part": "training", "begin": 1763855400.1, "end": 1763855402.6}
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Literal

from tinsmith.rl.record.layout import Layout

Part = Literal["sampling", "training", "publishing", "evaluation", "saving"]

_SHOWN_STEPS = 12
"""Steps in the chart: the newest ones."""
_WIDTH, _LEFT, _RIGHT, _ROW, _BAR = 1140, 80, 10, 22, 15
_COLORS: dict[str, int] = {"sampling": 1, "training": 2, "publishing": 3, "evaluation": 4, "saving": 3}
_TRAINER: tuple[Part, ...] = ("training", "publishing", "evaluation", "saving")


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a step, with its begin and end as Unix time in seconds.

    Example: Span(3, "training", 1763855400.1, 1763855402.6)
    """

    step: int
    part: Part
    begin: float
    end: float


class Timeline:
    """Appends to the timeline of a run folder."""

    def __init__(self, folder: Path) -> None:
        self._file = Layout(folder).timeline.open("a", buffering=1, encoding="utf-8")

    def add(self, part: Part, step: int, begin: float, end: float) -> None:
        """Write a span; one without a known begin is left out."""
        if begin:
            self._file.write(json.dumps(asdict(Span(step, part, begin, end))) + "\n")

    @contextmanager
    def span(self, part: Part, step: int) -> Iterator[None]:
        """Write the span of a block, if it ends without an error."""
        begin = time.time()
        yield
        self.add(part, step, begin, time.time())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read(folder: Path) -> list[Span]:
    """The spans of a run folder, in the order in which they were written."""
    file = Layout(folder).timeline
    spans = []
    for line in file.read_bytes().split(b"\n") if file.exists() else ():
        with suppress(ValueError, TypeError, LookupError):  # a line that is being written, or is no span
            row = json.loads(line)
            if row["part"] in _COLORS:
                spans.append(Span(int(row["step"]), row["part"], float(row["begin"]), float(row["end"])))
    return spans


class OverlapMeter:
    """Measures how much of the time in which the trainer works is also time in which rollouts are sampled."""

    def __init__(self, busy: Callable[[], float | None]) -> None:
        """`busy`: seconds in which rollouts were sampled, by the clock of the event loop; None if another process
        samples them."""
        self._busy = busy
        self._begin, self._waits = self._now(), [0.0, 0.0]

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark a block in which the trainer waits for rollouts."""
        before = self._now()
        yield
        self._waits = [total + now - then for total, now, then in zip(self._waits, self._now(), before, strict=True)]

    def lap(self) -> dict[str, float]:
        """The share since the previous call."""
        now = self._now()
        worked, sampled = (end - begin - wait for end, begin, wait in zip(now, self._begin, self._waits, strict=True))
        self._begin, self._waits = now, [0.0, 0.0]
        return {"time/overlap": min(1.0, sampled / worked)} if self._busy() is not None and worked > 0 else {}

    def _now(self) -> tuple[float, float]:
        return asyncio.get_running_loop().time(), self._busy() or 0.0


def svg(spans: Sequence[Span]) -> str:
    """Chart of the newest steps over time: a row for each batch that is sampled at a time, and one for the trainer.

    Empty without spans.
    """
    newest = max((span.step for span in spans), default=0)
    shown = [span for span in spans if span.step > newest - _SHOWN_STEPS]
    if not shown:
        return ""
    sampling = sorted((span for span in shown if span.part == "sampling"), key=lambda span: span.begin)
    rows = _rows(sampling)
    begin, end = min(span.begin for span in shown), max(span.end for span in shown)
    scale = (_WIDTH - _LEFT - _RIGHT) / max(end - begin, 1e-9)
    count = max(rows, default=-1) + 1

    def bar(span: Span, row: int) -> str:
        x, width = _LEFT + (span.begin - begin) * scale, max((span.end - span.begin) * scale, 1.0)
        title = f"{span.part} of step {span.step}: {span.end - span.begin:.3g} s, from {span.begin - begin:.3g} s on"
        label = f'<text class="bar" x="{x + 3:.1f}" y="{row * _ROW + 12}">{span.step}</text>' if width > 18 else ""
        return (
            f'<rect class="f{_COLORS[span.part]} {span.part}" x="{x:.1f}" y="{row * _ROW}" width="{width:.1f}" '
            f'height="{_BAR}"><title>{escape(title)}</title></rect>{label}'
        )

    bars = [bar(span, row) for span, row in zip(sampling, rows, strict=True)]
    bars += [bar(span, count) for span in shown if span.part in _TRAINER]
    names = [f'<text class="tick" x="0" y="{row * _ROW + 12}">sampling</text>' for row in range(count)]
    names.append(f'<text class="tick" x="0" y="{count * _ROW + 12}">trainer</text>')
    height = (count + 1) * _ROW + 18
    ticks = [
        f'<text class="tick" x="{_LEFT + share * (_WIDTH - _LEFT - _RIGHT):.0f}" y="{height - 4}" '
        f'text-anchor="{anchor}">{share * (end - begin):.3g} s</text>'
        for share, anchor in ((0, "start"), (0.25, "middle"), (0.5, "middle"), (0.75, "middle"), (1, "end"))
    ]
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img">{"".join([*names, *bars, *ticks])}</svg>'


def _rows(spans: Sequence[Span]) -> list[int]:
    """A row for each span, in order of their begin, so that no two spans of a row overlap."""
    ends: list[float] = []
    rows = []
    for span in spans:
        row = next((row for row, end in enumerate(ends) if end <= span.begin), len(ends))
        ends[row : row + 1] = [span.end]
        rows.append(row)
    return rows
