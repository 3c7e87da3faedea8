"""Results of the runs of compare.py, read from their folders: pictures, and a page of numbers and answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tinsmith.rl.record.monitors.jsonl import read_metrics

FILES = {
    "tinker": "the Tinker file, through a served Tinker API",
    "verl": "the verl file (LoRA), through the run's own service",
    "smollm2": "our file: a strict format",
    "arithmetic": "our file: one-digit sums and differences",
}
TRINITY_FILES = ("tinker", "verl")
_EDGE = 5
"""Number of steps in the means at the beginning and the end."""
_SHOWN = 3
"""Number of answers that are shown from the first and the last step."""

Row = dict[str, float]
Points = list[tuple[float, float]]


def draw_all(out: Path) -> None:
    """Draw gsm8k.png, and a chart for each other run that exists."""
    names = [name for name in TRINITY_FILES if _has_rewards(out / name)]
    curves = {FILES[name]: _points(rewarded(out / name), "reward/mean") for name in names}
    if curves:
        _draw(out / "gsm8k.png", "GSM8K: reward of each step (thin) and of the last five", curves)
    for name, key, label in (("arithmetic", "reward/mean", "right"), ("smollm2", "reward/form", "in the form")):
        if not _has_rewards(out / name):
            continue
        rows = rewarded(out / name)
        dots = {"held out, greedy: right": _points(rows, "eval/pass@1")}
        if held := _points(rows, "eval/reward/form"):
            dots["held out, greedy: in the form"] = held
        levels = [row["eval/constant_pass@1"] for row in rows if "eval/constant_pass@1" in row]
        _draw(
            out / f"{name}.png", FILES[name], {f"sampled in training: {label}": _points(rows, key)}, dots, levels[-1:]
        )


def report(out: Path) -> str:
    """Markdown: a table of the runs, the difference of the first two, and answers of the first and last step."""
    names = [name for name in FILES if _has_rewards(out / name)]
    lines = [
        "| run | steps | minutes | reward | in the form | right | tokens | held out, greedy: right | in the form |",
        "|---|---|---|---|---|---|---|---|---|",
        *(_line(name, rewarded(out / name)) for name in names),
        "",
        f"Arrows: from the mean of the first {_EDGE} steps to that of the last {_EDGE}; held out: before and after.",
        "Tokens are those of an answer.",
    ]
    if set(TRINITY_FILES) <= set(names):
        lines += ["", _difference(*(rewarded(out / name) for name in TRINITY_FILES))]
    return "\n".join([*lines, *(line for name in names for line in _answers(name, _folder(out / name)))]) + "\n"


def rewarded(folder: Path) -> list[Row]:
    """A row for each reinforcement step; the supervised stage before it has no rewards."""
    return read_metrics(_folder(folder))


def _folder(folder: Path) -> Path:
    return folder / "02-rewarded" if (folder / "stages.json").exists() else folder


def _has_rewards(folder: Path) -> bool:
    return any("reward/mean" in row for row in rewarded(folder))


def _points(rows: Sequence[Row], key: str) -> Points:
    return [(row["step"], row[key]) for row in rows if key in row]


def _format_share(row: Row, of: str = "") -> float:
    """The share of answers in the format: Trinity's math reward adds 0.1 for it, and subtracts 0.1 without."""
    by_trinity = row.get(f"{of}reward/math/format")
    return row[f"{of}reward/form"] if by_trinity is None else by_trinity * 5 + 0.5


def _right(row: Row) -> float:
    return next(row[key] for key in ("reward/math/accuracy", "reward/right", "reward/number") if key in row)


def _line(name: str, rows: Sequence[Row]) -> str:
    trained = [row for row in rows if "reward/mean" in row]
    held_out = [row for row in rows if "eval/pass@1" in row]
    seconds = sum(row.get("time/step", 0.0) + row.get("time/eval", 0.0) for row in rows)
    cells = [
        FILES[name],
        str(len(trained)),
        f"{seconds / 60:.0f}",
        _span([row["reward/mean"] for row in trained]),
        "-" if name == "arithmetic" else _span([_format_share(row) for row in trained]),
        _span([_right(row) for row in trained]),
        _span([row["tokens/reply"] for row in trained], 0),
        _ends([row["eval/pass@1"] for row in held_out]),
        "-" if name == "arithmetic" else _ends([_format_share(row, "eval/") for row in held_out]),
    ]
    return f"| {' | '.join(cells)} |"


def _ends(values: Sequence[float]) -> str:
    return f"{values[0]:.3f} → {values[-1]:.3f}" if values else "-"


def _span(values: Sequence[float], digits: int = 3) -> str:
    first, last = values[:_EDGE], values[-_EDGE:]
    return f"{sum(first) / len(first):.{digits}f} → {sum(last) / len(last):.{digits}f}"


def _difference(first: Sequence[Row], second: Sequence[Row]) -> str:
    """The difference of two curves, and the standard error of one step's mean."""
    trained = ([row for row in rows if "reward/mean" in row] for rows in (first, second))
    pairs = list(zip(*trained, strict=False))
    differences = [a["reward/mean"] - b["reward/mean"] for a, b in pairs]
    errors = [
        (row["reward/std"] ** 2 * row["tokens/reply"] / row["tokens/sampled"]) ** 0.5 for pair in pairs for row in pair
    ]
    mean = sum(differences) / len(differences)
    absolute = sum(map(abs, differences)) / len(differences)
    return (
        f"Of {len(pairs)} steps the rewards of the first two runs differ by {mean:+.3f} in the mean and by "
        f"{absolute:.3f} at a step; the standard error of one step's reward is {sum(errors) / len(errors):.3f}."
    )


def _answers(name: str, folder: Path) -> list[str]:
    """The first answers of the first and of the last step, one for each task."""
    files = sorted((folder / "rollouts").glob("train-*.jsonl"))
    lines = ["", f"## {name}"]
    for file in dict.fromkeys((files[0], files[-1])) if files else ():
        rows: list[dict[str, Any]] = [json.loads(line) for line in file.read_text().splitlines()]
        lines += ["", f"Step {rows[0]['step']}:", ""]
        for row in [row for row in rows if row["index"] == 0][:_SHOWN]:
            text = json.dumps(row["text"], ensure_ascii=False)
            lines.append(f"- {text} (reward {row['reward']:g}; right is {row['answer'].rpartition('####')[2].strip()})")
    return lines


def _draw(
    target: Path,
    title: str,
    curves: dict[str, Points],
    dots: dict[str, Points] | None = None,
    level: Sequence[float] = (),
) -> None:
    """Draw raw curves thin, smoothed curves thick, and dots with dashed lines."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.2, 4.2), layout="constrained")
    for color, (label, points) in zip(("tab:blue", "tab:orange"), curves.items(), strict=False):
        steps, values = [step for step, _ in points], [value for _, value in points]
        axes.plot(steps, values, color=color, alpha=0.3, linewidth=1)
        axes.plot(steps, _smooth(values), color=color, linewidth=2, label=label)
    for color, (label, points) in zip(("tab:green", "tab:purple"), (dots or {}).items(), strict=False):
        axes.plot(*zip(*points, strict=True), "o--", color=color, label=label)
    for value in level:
        axes.axhline(value, color="gray", linestyle=":", label="held out: the best constant answer")
    axes.set(title=title, xlabel="step", ylabel="mean reward" if dots is None else "share of answers")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(target, dpi=120)
    pyplot.close(figure)


def _smooth(values: Sequence[float], window: int = 5) -> list[float]:
    """Moving averages over up to `window` values."""
    return [sum(part := values[max(0, at - window + 1) : at + 1]) / len(part) for at in range(len(values))]
