"""Line charts as inline SVG, without a library. Colors are CSS classes of the page.

Example: svg([Curve(name="reward", points=((1, 0.1), (2, 0.2)))], floor=0.0) is '<svg …>…</svg>'.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 240
LEFT, RIGHT, TOP, BOTTOM = 54, 14, 12, 28

Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One line of a chart.

    Example: Curve(name="pass@1", points=((0, 0.0), (10, 0.4)), color=2, dots=True)
    """

    name: str
    points: tuple[Point, ...]
    color: int = 1
    """CSS class c1 to c4."""
    dots: bool = False
    """Mark each point."""
    faint: bool = False
    """Draw it first, thin and without a legend entry."""
    dashed: bool = False


def smooth(points: Sequence[Point]) -> tuple[Point, ...]:
    """Centered moving average; the window holds a tenth of the points."""
    half_window = len(points) // 20
    means = []
    for index, (x, _) in enumerate(points):
        window = points[max(0, index - half_window) : index + half_window + 1]
        means.append((x, sum(y for _, y in window) / len(window)))
    return tuple(means)


def svg(
    curves: Sequence[Curve], *, floor: float | None = None, ceiling: float | None = None, span: Point | None = None
) -> str:
    """Return a chart of curves over steps, or an empty string without points.

    The y axis always includes `floor` and `ceiling`, and the x axis goes over `span`, so that charts of one page have
    one axis; without it, over the points.
    """
    points = [point for curve in curves for point in curve.points if math.isfinite(point[1])]
    if not points:
        return ""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    first, last = (min([*xs, *(span or ())]), max([*xs, *(span or ())]))
    last = max(last, first + 1)
    x_ticks = [tick for tick in _ticks(first, last, 6) if tick == round(tick)]
    y_ticks = _ticks(min([*ys, *_optional(floor)]), max([*ys, *_optional(ceiling)]), 4)
    plane = _Plane((first, last), (y_ticks[0], y_ticks[-1]))
    parts = [_grid(plane, x_ticks, y_ticks)]
    parts += [_line(plane, curve) for curve in sorted(curves, key=lambda curve: not curve.faint)]
    shown = [curve for curve in curves if not curve.faint and not curve.dashed]
    data = [
        {
            "name": curve.name,
            "color": curve.color,
            "at": [[*plane.place(point), *point] for point in curve.points if math.isfinite(point[1])],
        }
        for curve in shown
    ]
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" data-curves="{escape(json.dumps(data))}">{"".join(parts)}'
        f'<line class="cursor" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/></svg>'
    )


@dataclass(frozen=True, slots=True)
class _Plane:
    x_span: Point
    y_span: Point

    def place(self, point: Point) -> tuple[float, float]:
        (x0, x1), (y0, y1) = self.x_span, self.y_span
        x = LEFT + (point[0] - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT)
        y = HEIGHT - BOTTOM - (point[1] - y0) / (y1 - y0) * (HEIGHT - TOP - BOTTOM)
        return round(x, 1), round(y, 1)


def _grid(plane: _Plane, x_ticks: Sequence[float], y_ticks: Sequence[float]) -> str:
    parts = []
    for tick in y_ticks:
        _, y = plane.place((plane.x_span[0], tick))
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{_number(tick)}</text>')
    for tick in x_ticks:
        if plane.x_span[0] <= tick <= plane.x_span[1]:
            x, _ = plane.place((tick, plane.y_span[0]))
            parts.append(f'<text class="tick" x="{x}" y="{HEIGHT - 8}" text-anchor="middle">{_number(tick)}</text>')
    return "".join(parts)


def _line(plane: _Plane, curve: Curve) -> str:
    places = [plane.place(point) for point in curve.points if math.isfinite(point[1])]
    if not places:
        return ""
    kind = f"c{curve.color}" + " faint" * curve.faint + " dashed" * curve.dashed
    path = "M" + "L".join(f"{x} {y}" for x, y in places)
    dots = "".join(f'<circle class="{kind}" cx="{x}" cy="{y}" r="3.5"/>' for x, y in places) if curve.dots else ""
    return f'<path class="{kind}" d="{path}"/>{dots}'


def _ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers that cover `low` to `high`."""
    if high - low < 1e-12:
        margin = abs(low) / 2 or 0.5
        low, high = low - margin, high + margin
    raw = (high - low) / count
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]


def _number(value: float) -> str:
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:,.6g}"
    return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")


def _optional(value: float | None) -> list[float]:
    return [] if value is None else [value]
