"""The drawn pictures of the documentation: boxes on a grid, and arrows between them, as SVG files.

`python -m tools.pictures` (or `make docs`) writes docs/images/*.svg; `tests/docs/test_pictures.py` fails when one is
stale. Colors are readable on a light and on a dark page: boxes have a background of their own, other text is grey.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass, field
from pathlib import Path
from xml.sax.saxutils import escape

IMAGES = Path(__file__).parents[1] / "docs" / "images"

CELL_WIDTH, CELL_HEIGHT = 190, 84
GAP_X, GAP_Y = 90, 46
MARGIN = 14
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
FILLS = {"plain": "#e8eef7", "data": "#fdf3d8", "process": "#dff1e4"}


@dataclass(frozen=True)
class Box:
    """A box at a column and row of the grid: its first line is bold."""

    column: float
    row: float
    text: str
    kind: str = "plain"

    @property
    def left(self) -> float:
        return MARGIN + self.column * (CELL_WIDTH + GAP_X)

    @property
    def top(self) -> float:
        return MARGIN + self.row * (CELL_HEIGHT + GAP_Y)


@dataclass(frozen=True)
class Arrow:
    """An arrow from one box to another, by their names, with a label."""

    start: str
    end: str
    label: str = ""
    dashed: bool = False


@dataclass(frozen=True)
class Picture:
    """Boxes by name, and arrows; `title` is read out by screen readers."""

    title: str
    boxes: dict[str, Box]
    arrows: list[Arrow] = field(default_factory=list)

    def svg(self) -> str:
        """The whole file."""
        width = max(box.left for box in self.boxes.values()) + CELL_WIDTH + MARGIN
        height = max(box.top for box in self.boxes.values()) + CELL_HEIGHT + MARGIN
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
            f'height="{height:g}" role="img" font-family="{FONT}">',
            f"<title>{escape(self.title)}</title>",
            '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            'orient="auto-start-reverse"><path d="M 0 0 L 10 5 L 0 10 z" fill="#7a8594"/></marker></defs>',
            *(_box(box) for box in self.boxes.values()),
            *(_arrow(self.boxes[arrow.start], self.boxes[arrow.end], arrow) for arrow in self.arrows),
            "</svg>",
        ]
        return "\n".join(parts) + "\n"


def _box(box: Box) -> str:
    lines = box.text.split("\n")
    first = box.top + CELL_HEIGHT / 2 - (len(lines) - 1) * 8.5 + 4.5
    text = "".join(
        f'<text x="{box.left + CELL_WIDTH / 2:g}" y="{first + 17 * number:g}" text-anchor="middle" '
        f'font-size="{14 if number == 0 else 12}" font-weight="{600 if number == 0 else 400}" '
        f'fill="#1b2a41">{escape(line)}</text>'
        for number, line in enumerate(lines)
    )
    return (
        f'<rect x="{box.left:g}" y="{box.top:g}" width="{CELL_WIDTH}" height="{CELL_HEIGHT}" rx="8" '
        f'fill="{FILLS[box.kind]}" stroke="#4a6fa5" stroke-width="1.5"/>{text}'
    )


def _arrow(start: Box, end: Box, arrow: Arrow) -> str:
    """A straight line between the facing edges; two arrows between the same boxes lie beside each other."""
    if abs(end.column - start.column) >= abs(end.row - start.row):
        right = end.column > start.column
        shift = -14 if right else 14
        x1, x2 = start.left + (CELL_WIDTH if right else 0), end.left + (0 if right else CELL_WIDTH)
        y1, y2 = start.top + CELL_HEIGHT / 2 + shift, end.top + CELL_HEIGHT / 2 + shift
        anchor, dx, dy = "middle", 0, (-6 if right else 16)
        if start.row != end.row:
            y1, y2 = start.top + CELL_HEIGHT / 2, end.top + (12 if end.row > start.row else CELL_HEIGHT - 12)
            anchor, dx, dy = "start", 14, 0
    else:
        down = end.row > start.row
        shift = -18 if down else 18
        x1, x2 = start.left + CELL_WIDTH / 2 + shift, end.left + CELL_WIDTH / 2 + shift
        y1, y2 = start.top + (CELL_HEIGHT if down else 0), end.top + (0 if down else CELL_HEIGHT)
        anchor, dx, dy = ("end", -6, 4) if down else ("start", 6, 4)
    dash = ' stroke-dasharray="5 4"' if arrow.dashed else ""
    line = (
        f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="#7a8594" stroke-width="1.5"{dash} '
        'marker-end="url(#tip)"/>'
    )
    label = (
        f'<text x="{(x1 + x2) / 2 + dx:g}" y="{(y1 + y2) / 2 + dy:g}" text-anchor="{anchor}" font-size="11.5" '
        f'fill="#7a8594">{escape(arrow.label)}</text>'
        if arrow.label
        else ""
    )
    return line + label


def _chain(*names: str) -> list[Arrow]:
    return [Arrow(start, end) for start, end in itertools.pairwise(names)]


PICTURES: dict[str, Picture] = {
    "two-halves": Picture(
        "The harness and the service, with the tinker SDK between them",
        {
            "loop": Box(0, 0, "harness\ntinsmith run\ntasks, rewards, algorithm"),
            "api": Box(1.4, 0, "service\ntinsmith serve\nAPI process: queue, database"),
            "client": Box(0, 1, "any Tinker client\nthe same SDK and key"),
            "trainer": Box(2.6, 0, "engine\ntrainer: adapters,\ngradients, AdamW", "process"),
            "sampler": Box(2.6, 1, "engine\nsampler: built in\nor vLLM", "process"),
            "disk": Box(1.4, 1, "data folder\ndatabase, journal,\ncheckpoints", "data"),
        },
        [
            Arrow("loop", "api", "tinker SDK, HTTP"),
            Arrow("api", "loop", "futures"),
            Arrow("client", "api"),
            Arrow("api", "trainer", "training"),
            Arrow("api", "sampler", "samples"),
            Arrow("api", "disk", "before it answers"),
            Arrow("trainer", "sampler", "versions"),
        ],
    ),
    "service-objects": Picture(
        "A session holds a model; its versions are sampled from, its checkpoints are kept",
        {
            "tenant": Box(0, 0, "tenant\nkeys, quotas"),
            "session": Box(1, 0, "session\nwhat a client opens"),
            "model": Box(2, 0, "model\nLoRA adapter and\noptimizer state"),
            "base": Box(2, 1, "base model\nfrozen, shared by all", "process"),
            "version": Box(3, 0, "version\nnever changes"),
            "checkpoint": Box(3, 1, "checkpoint\ntinker://RUN/weights/NAME", "data"),
            "sampling": Box(4, 0, "sampling session\nsamples one version"),
        },
        [
            Arrow("tenant", "session", "owns"),
            Arrow("session", "model", "creates"),
            Arrow("model", "base", "adapts"),
            Arrow("model", "version", "save_weights"),
            Arrow("model", "checkpoint", "save_state"),
            Arrow("version", "sampling", "is read by"),
        ],
    ),
    "one-step": Picture(
        "One step of a run: tasks, rollouts, rewards, advantages, one update",
        {
            "tasks": Box(0, 0, "tasks\ngroups_per_step", "data"),
            "rollouts": Box(1, 0, "rollouts\ngroup_size of each task\nby the workflow"),
            "rewards": Box(2, 0, "rewards\na number for\neach rollout"),
            "filters": Box(3, 0, "filters\nkept or dropped"),
            "advantages": Box(3, 1, "advantages\ncompared within\nthe group"),
            "update": Box(2, 1, "update\nloss, gradient,\noptimizer step", "process"),
            "weights": Box(1, 1, "weights of step n\npublished to the sampler", "process"),
            "folder": Box(0, 1, "run folder\nmetrics, rollouts,\ncheckpoints, report", "data"),
        },
        [
            *_chain("tasks", "rollouts", "rewards", "filters", "advantages", "update", "weights"),
            Arrow("weights", "rollouts", "next batch"),
            Arrow("weights", "folder"),
        ],
    ),
    "prefix-tree": Picture(
        "Three conversations that fork after a turn: rows repeat what they share, the packed pass computes it once",
        {
            "row1": Box(0, 0, "row 1\nturns 1, 2, 3", "data"),
            "row2": Box(0, 1, "row 2\nturns 1, 2, 4", "data"),
            "row3": Box(0, 2, "row 3\nturns 1, 5, 6", "data"),
            "1": Box(1.4, 1, "turn 1\ncomputed once\nfor three rows", "process"),
            "2": Box(2.4, 0.5, "turn 2\nonce for two", "process"),
            "3": Box(3.4, 0, "turn 3", "process"),
            "4": Box(3.4, 1, "turn 4", "process"),
            "5": Box(2.4, 2, "turn 5", "process"),
            "6": Box(3.4, 2, "turn 6", "process"),
        },
        [
            Arrow("row2", "1", "packed"),
            *_chain("1", "2", "3"),
            Arrow("2", "4"),
            *_chain("1", "5", "6"),
        ],
    ),
    "tour-request": Picture(
        "A forward_backward: acknowledged once it is stored, computed with others, fetched by a long poll",
        {
            "client": Box(0, 0, "client\nforward_backward"),
            "route": Box(1, 0, "route\nkey, model, inputs,\nquota"),
            "store": Box(2, 0, "store\none commit for all\nthat wait", "data"),
            "scheduler": Box(3, 0, "scheduler\norder of each model,\nturns of tenants"),
            "trainer": Box(3, 1, "trainer\nmicro-batches, packed,\nshared prefixes", "process"),
            "queue": Box(2, 1, "result\nstored and published", "data"),
            "futures": Box(1, 1, "futures\nwake the long poll"),
            "answer": Box(0, 1, "client\nresult"),
        },
        [
            Arrow("client", "route", "POST"),
            Arrow("route", "client", "future"),
            *_chain("route", "store", "scheduler", "trainer", "queue", "futures", "answer"),
        ],
    ),
    "tour-sample": Picture(
        "A sample: admitted in turn, prefilled from the prefix cache, decoded in one batch",
        {
            "client": Box(0, 0, "client\nasample"),
            "route": Box(1, 0, "route\nids of the sequences"),
            "version": Box(2, 0, "version\nof the weights", "data"),
            "admission": Box(3, 0, "admission\ncache tokens,\nturns of tenants"),
            "cache": Box(3, 1, "prefix cache\ntokens already\ncomputed", "process"),
            "decode": Box(2, 1, "prefill, decode\none token for all\nsequences a step", "process"),
            "futures": Box(1, 1, "futures\none poll per session"),
            "answer": Box(0, 1, "client\ntokens, logprobs"),
        },
        [
            Arrow("client", "route", "POST"),
            Arrow("route", "client", "future"),
            *_chain("route", "version", "admission", "cache", "decode", "futures", "answer"),
        ],
    ),
}


def main() -> None:
    """Write all pictures, and print those that changed."""
    for name, picture in PICTURES.items():
        path = IMAGES / f"{name}.svg"
        text = picture.svg()
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            sys.stdout.write(f"docs/images/{path.name}\n")


if __name__ == "__main__":
    main()
