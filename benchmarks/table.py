"""Results as JSON, as a Markdown table and as a chart."""

from __future__ import annotations

import json
import os
import platform
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from benchmarks.comparison import Line

TITLE = "Speed (`make bench`, `benchmarks/speed.py`)"
LABEL_WIDTH = 80
"""Characters in a line of a picture's labels."""
HEADER = (
    "| work | baseline, in turns with it | ours | theirs | measured: median (range) | at least | aim | reached |\n"
    "|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Lines measured in one process."""

    measured: str
    """Time of the measurement."""
    machine: str
    lines: list[Line]


def read(results: Path) -> dict[str, Part]:
    """The parts in an existing result file."""
    file = results.with_suffix(".json")
    if not file.is_file():
        return {}
    return {
        name: Part(**{**part, "lines": [Line(**line) for line in part["lines"]]})
        for name, part in json.loads(file.read_text()).items()
    }


def write(results: Path, parts: Mapping[str, Part], order: Sequence[str], title: str = TITLE) -> None:
    """Write the result files, with parts in this order."""
    ordered = {name: parts[name] for name in order if name in parts}
    results.parent.mkdir(exist_ok=True)
    results.with_suffix(".json").write_text(
        json.dumps({name: asdict(part) for name, part in ordered.items()}, indent=1) + "\n"
    )
    results.with_suffix(".md").write_text(_markdown(ordered, title))
    lines = [line for part in ordered.values() for line in part.lines if line.values and line.least is not None]
    if lines:
        _draw(results.with_suffix(".png"), lines)


def machine() -> str:
    """Description of the machine."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "peft"))
    amx = " and AMX" if torch.cpu._is_amx_tile_supported() else ""
    instructions = torch.backends.cpu.get_cpu_capability() + amx
    return f"{os.cpu_count()} CPU cores, {platform.machine()} with {instructions}, {packages}"


def row(line: Line) -> str:
    """The line as a row of the table."""
    marks = [_value(mark, line.unit) if mark is not None else "" for mark in (line.least, line.aim)]
    if line.lower:
        marks = [f"≤ {mark}" if mark else "" for mark in marks]
    low, high = (_value(value, line.unit) for value in line.value_range) if line.values else ("", "")
    measured = f"**{_value(line.median, line.unit)}** ({low} to {high})" if len(line.values) > 1 else ""
    if len(line.values) == 1:
        measured = f"**{_value(line.median, line.unit)}**"
    work = f"{line.work} ({line.note})" if line.note else line.work
    return f"| {' | '.join([work, line.baseline, line.ours, line.theirs, measured, *marks, line.verdict])} |"


def _markdown(parts: Mapping[str, Part], title: str) -> str:
    machines = list(dict.fromkeys(part.machine for part in parts.values()))
    days = sorted(part.measured for part in parts.values())
    lines = [
        f"# {title}",
        "",
        "Each line in one run, both sides in turns; the range is from the smallest to the largest turn, or from 5 to "
        "95 % from twenty turns on. How and why: [NOTES.md](../NOTES.md).",
        "",
        f"{'; '.join(machines)}. From {days[0]} to {days[-1]}.",
        "",
        HEADER,
        *(row(line) for part in parts.values() for line in part.lines),
        "",
    ]
    return "\n".join(lines)


def _value(value: float, unit: str) -> str:
    if unit == "":
        return f"{value:.2g}"
    text = f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{text}{unit}" if unit == "x" else f"{text} {unit}"


def _draw(file: Path, lines: Sequence[Line]) -> None:
    """A bar chart: how many times better than promised each line is, with a tick at the aim."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(11, 0.42 * len(lines) + 1.2), layout="constrained")
    for place, line in enumerate(reversed(lines)):
        low, middle, high = sorted(_times_better(value, line) for value in (*line.value_range, line.median))
        color = {"aim": "#2e7d32", "yes": "#558b2f"}.get(line.verdict, "#c62828")
        axes.barh(place, middle, color=color, height=0.55)
        axes.plot([low, high], [place, place], color="black", linewidth=1)
        if line.aim is not None:
            aim = _times_better(line.aim, line)
            axes.plot([aim, aim], [place - 0.35, place + 0.35], color="#1565c0", linewidth=2)
        axes.text(
            1.01, place, _value(line.median, line.unit), transform=axes.get_yaxis_transform(), va="center", fontsize=8
        )
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log")
    axes.set_ylim(-0.7, len(lines) - 0.3)
    labels = [textwrap.fill(line.work, LABEL_WIDTH) for line in reversed(lines)]
    axes.set_yticks(range(len(lines)), labels, fontsize=7)
    figure.supxlabel(
        "times better than promised (blue: the aim; black: the range); at the right the measured value", fontsize=9
    )
    figure.savefig(file, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def _times_better(value: float, line: Line) -> float:
    """Above 1 the promise holds; a cost of zero or less is drawn as a hundredth of the promise."""
    assert line.least is not None
    return line.least / max(value, line.least / 100) if line.lower else max(value, line.least / 100) / line.least
