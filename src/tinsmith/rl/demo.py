"""The demo: two run files of the package, an introduction and a summary.

`addition` takes SmolLM2-135M from no right answer to most sums of two-digit numbers right; `largest` (the quick one)
picks the largest of four numbers. Nothing else about them is special: they run as any other file does.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import as_file, files
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from tinsmith.rl.config import RunConfig
from tinsmith.rl.monitors.jsonl import read_metrics
from tinsmith.settings import read


def settings(*, quick: bool, seed: int, out: Path | None, overrides: Sequence[str]) -> RunConfig:
    """The configuration of the demo with `overrides` applied, in a new folder unless `out` is given."""
    name = "largest" if quick else "addition"
    folder = out or _fresh(Path("runs") / f"demo-{name}")
    with as_file(files("tinsmith.rl") / f"demo_{name}.yaml") as file:
        return read(RunConfig, file, [f"seed={seed}", f"folder={folder}", *overrides])


def introduce(config: RunConfig, console: Console) -> None:
    """Print what the demo trains, with an example task."""
    task = config.tasks.sources[0].load()[0]
    console.print(f"[bold]{escape(config.description)}[/]", soft_wrap=True)
    console.print(
        f"[dim]question:[/] {escape(task.messages[-1].content)}  [dim]right:[/] {task.answer}",
        highlight=False,
        soft_wrap=True,
    )
    size = f"{config.steps} steps of {config.groups_per_step} tasks x {config.group_size} answers"
    how = f"{config.model.name}, LoRA rank {config.model.rank}, {config.algorithm.type}: {size}, seed {config.seed}"
    console.print(f"[dim]{escape(how)}[/]\n", highlight=False, soft_wrap=True)


def conclude(folder: Path, console: Console) -> None:
    """Print held-out accuracy before and after training, and that of the best constant answer."""
    rows = [row for row in read_metrics(folder) if "eval/pass@1" in row]
    if not rows:
        return
    first, last = rows[0], rows[-1]
    constant = max(row.get("eval/constant_pass@1", 0.0) for row in rows)
    console.print(
        f"\n[bold]held-out exact match {first['eval/pass@1']:.3f} → [green]{last['eval/pass@1']:.3f}[/][/] "
        f"on {last['eval/tasks']:.0f} tasks never trained on "
        f"[dim](always giving the best constant answer scores {constant:.3f})[/]",
        highlight=False,
        soft_wrap=True,
    )


def _fresh(folder: Path) -> Path:
    """`folder`, or the first of folder-2, folder-3, … that does not exist."""
    number, free = 1, folder
    while free.exists():
        number += 1
        free = folder.with_name(f"{folder.name}-{number}")
    return free
