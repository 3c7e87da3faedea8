"""A run in the terminal: how it stands, its curves, what keeps it from learning, and lists of its rollouts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tinsmith.plurals import counted
from tinsmith.rl.diagnosis import diagnose
from tinsmith.rl.history.console_text import line, number, plain, sparkline
from tinsmith.rl.history.metric_table import MetricTable
from tinsmith.rl.history.rows import Page, RolloutRow
from tinsmith.rl.history.run import RunHistory
from tinsmith.rl.record.metrics import measures_right

_CURVES = (
    "reward/mean", "eval/pass@1", "eval/reward/mean", "groups/constant", "rollouts/cut", "rollouts/failed",
    "tokens/reply", "optim/entropy", "optim/kl_sample_train_v2", "optim/grad_norm", "optim/loss", "optim/expert_nll",
)  # fmt: skip
_BAR_COLUMNS = 40
_WIDE, _NARROW, _TASK, _PREVIEW = 100, 70, 28, 12
"""Widths of a terminal for all columns of a list and for the fewest; characters of a task's name and of a reply."""
_STYLES = {"running": "cyan", "finished": "green", "stopped": "yellow", "died": "red", "new": "dim"}


def print_overview(run: RunHistory, console: Console) -> None:
    """Print how a run stands; of a run in stages, each of them."""
    status, metrics = run.status, run.metrics
    steps = f"step {status.step} of {run.step_count}" if run.step_count else counted(status.step, "step")
    head = Text.assemble((plain(run.name), "bold"), "  ", (status.condition, _STYLES[status.condition]), f"  {steps}")
    console.print(head, soft_wrap=True)
    if status.reason:
        console.print(Text(plain(status.reason), style="dim"), soft_wrap=True)
    console.print(Text(str(run.path), style="dim"), soft_wrap=True)
    for stage in run.stages:
        console.print()
        print_overview(stage, console)
    if metrics.rows:
        console.print(_curves(metrics, console.width))
        _print_diagnosis(run, console)
    for result in run.results:
        headline = "eval/pass@" if measures_right([_numbers(result)]) else "eval/reward/mean"
        values = "  ".join(f"{name} {number(value)}" for name, value in result.items() if name.startswith(headline))
        console.print(Text(plain(f"{result.get('checkpoint', '')}  {values}")), soft_wrap=True)
    if rows := [row for row in run.comparison if {"first", "second", "p_value"} <= row.keys()]:
        from tinsmith.rl.record import comparison

        comparison.print_tables(console, rows)
    if run.parts:
        console.print(Text(f"parts: {', '.join(run.parts)} (--part NAME)", style="dim"), soft_wrap=True)


def _print_diagnosis(run: RunHistory, console: Console) -> None:
    diagnosis = diagnose(run.settings, run.metrics.rows)
    if diagnosis.summary:
        console.print(Text(diagnosis.summary), soft_wrap=True)
    for finding in diagnosis.findings:
        style = "red" if finding.severity == "error" else "yellow"
        console.print(Text.assemble((f"{finding.severity}: ", style), plain(finding.text)), soft_wrap=True)


def _curves(metrics: MetricTable, width: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("", "first", "last"):
        table.add_column(name, justify="right" if name else "left", overflow="fold")
    columns = min(_BAR_COLUMNS, max(0, width - 56))
    if columns >= 8:
        table.add_column("")
    for name in _shown_names(metrics):
        values = [value for _, value in metrics.points(name)]
        bars = [sparkline(values, columns)] if columns >= 8 else []
        table.add_row(*map(Text, (plain(name), number(values[0]), number(values[-1]), *bars)))
    return table


def _numbers(result: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in result.items() if isinstance(value, int | float)}


def _shown_names(metrics: MetricTable) -> Iterator[str]:
    right = measures_right(metrics.rows)
    yield from (name for name in _CURVES if name in metrics.names and (right or "/pass@" not in name))
    parts = [name for name in metrics.names if name.startswith("reward/") and name not in (*_CURVES, "reward/std")]
    yield from parts[:12]


def print_rollouts(run: RunHistory, page: Page, console: Console) -> None:
    """Print a list of rollouts."""
    rows, folder = page.rows, run.path
    wide, narrow = console.width >= _WIDE, console.width < _NARROW
    names = (
        "rollout",
        *(() if narrow else ("task",)),
        "reward",
        *(("advantage", "turns") if wide else ()),
        "tokens",
        "",
    )
    cells = [_cells(row, 0 if narrow else _TASK if wide else _TASK // 2, wide=wide) for row in rows]
    table = Table(box=box.SIMPLE_HEAD)
    for name in names:
        table.add_column(name, justify="left" if name in ("rollout", "task", "") else "right", overflow="fold")
    table.add_column("reply", overflow="fold")
    widths = [max(map(cell_len, column)) for column in zip(names, *cells, strict=True)]
    rest = console.width - sum(widths) - 3 * len(widths) - 4
    for row, each in zip(rows, cells, strict=True):
        table.add_row(*map(Text, each), Text(line(row.preview, max(_PREVIEW, rest)), style="red" if row.failed else ""))
    console.print(table)
    shown = f"{len(rows)} of {counted(page.total, 'rollout')}"
    more = "" if len(rows) >= page.total else "; --limit and --sort show others"
    console.print(Text(f"{shown}{more}. One whole: tinsmith show {plain(str(folder))} ID", style="dim"), soft_wrap=True)


def _cells(row: RolloutRow, task: int, *, wide: bool) -> tuple[str, ...]:
    detail = (number(row.advantage), str(row.turns)) if wide else ()
    tasks = (line(row.task, task),) if task else ()
    return (row.id, *tasks, number(row.reward), *detail, str(row.tokens), _note(row))


def _note(row: RolloutRow) -> str:
    if row.failed:
        return "failed"
    right = "" if row.correct is None else "right" if row.correct else "wrong"
    return " ".join(filter(None, (right, "cut off" if row.cut else "")))
