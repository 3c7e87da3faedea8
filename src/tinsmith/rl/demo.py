"""The demo: two run files of the package, an introduction and a summary.

`addition` trains SmolLM2-135M on two-digit addition, from 0 % to about 80 % correct; `largest` (--quick) trains it to
pick the largest of four numbers. Both are ordinary run files.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import as_file, files
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from tinsmith.plurals import counted
from tinsmith.rl.config import RunConfig
from tinsmith.rl.record.metrics import measures_right
from tinsmith.rl.record.monitors.jsonl import read_metrics
from tinsmith.settings import read


def settings(*, quick: bool, seed: int, out: Path | None, overrides: Sequence[str]) -> RunConfig:
    """The configuration of the demo with `overrides` applied, in a new folder unless `out` is given."""
    name = "largest" if quick else "addition"
    folder = out or _unused_folder(Path("runs") / f"demo-{name}")
    with as_file(files("tinsmith.rl") / f"demo_{name}.yaml") as file:
        return read(RunConfig, file, [f"seed={seed}", f"folder={folder}", *overrides])


def introduce(config: RunConfig, console: Console) -> None:
    """Print what the demo trains, with an example task."""
    task = config.tasks.sources[0].load()[0]
    console.print(f"[bold]{escape(config.description)}[/]", soft_wrap=True)
    console.print(
        f"[dim]question:[/] {escape(task.messages[-1].content)}  [dim]answer:[/] {task.answer}",
        highlight=False,
        soft_wrap=True,
    )
    batch = f"{counted(config.groups_per_step, 'task')} x {counted(config.group_size, 'answer')}"
    size = f"{counted(config.steps, 'step')} of {batch}"
    summary = f"{config.model.name}, LoRA rank {config.model.rank}, {config.algorithm.type}: {size}, seed {config.seed}"
    console.print(f"[dim]{escape(summary)}[/]\n", highlight=False, soft_wrap=True)


def conclude(folder: Path, console: Console) -> None:
    """Print held-out accuracy, or the reward where nothing says what is right, before and after training, and that of
    the best constant answer."""
    rows = [row for row in read_metrics(folder) if "eval/pass@1" in row]
    if not rows:
        return
    first, last = rows[0], rows[-1]
    right = measures_right(rows)
    name, title = ("eval/pass@1", "exact match") if right else ("eval/reward/mean", "reward")
    baseline = "eval/constant_pass@1" if right else "eval/constant_reward"
    constant = max(row.get(baseline, 0.0) for row in rows)
    console.print(
        f"\n[bold]held-out {title} {first.get(name, 0.0):.3f} → [green]{last.get(name, 0.0):.3f}[/][/] "
        f"on {counted(last['eval/tasks'], 'task')} never trained on "
        f"[dim](always giving the best constant answer scores {constant:.3f})[/]",
        highlight=False,
        soft_wrap=True,
    )


def _unused_folder(folder: Path) -> Path:
    """`folder`, or the first of folder-2, folder-3, … that does not exist."""
    number, candidate = 1, folder
    while candidate.exists():
        number += 1
        candidate = folder.with_name(f"{folder.name}-{number}")
    return candidate
