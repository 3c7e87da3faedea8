"""A run in the terminal: regular lines, and a progress bar if the output is a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from typing_extensions import override

from tinsmith.plurals import counted
from tinsmith.rl.diagnosis import Diagnosis, Finding, first_batch
from tinsmith.rl.record.layout import Kind
from tinsmith.rl.record.metrics import measures_right
from tinsmith.rl.record.monitors.base import Monitor, RunInfo, roles_of
from tinsmith.rl.types import Group
from tinsmith.settings import Settings

_LINES = 30
_BAR = 20


class ConsoleConfig(Settings):
    """Lines and a progress bar in the terminal."""

    type: Literal["console"] = "console"
    every: int = Field(default=0, ge=0)
    """Number of steps between lines. 0: about 30 lines per run."""


class ConsoleMonitor(Monitor):
    """Prints lines and a progress bar to a console."""

    def __init__(self, config: ConsoleConfig, info: RunInfo, console: Console) -> None:
        self._console, self._info = console, info
        self._every = config.every or max(1, info.steps // _LINES)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("[dim]took"),
            TimeElapsedColumn(),
            TextColumn("[dim]left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=console,
            transient=True,
            expand=True,
        )
        self._shown: set[str] = set()
        self._last = Diagnosis()
        self._right = False
        self._bar = self._progress.add_task(f"{info.name}  starting", total=info.steps, completed=info.start)
        if console.is_terminal:
            self._progress.start()

    @override
    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._right = self._right or measures_right([values])
        if "eval/pass@1" in values:
            self._console.print(_evaluation(step, values, right=self._right), highlight=False, soft_wrap=True)
        if "time/step" not in values:
            return
        if step == 1 and (note := first_batch(self._info.settings, values)):
            self._console.print(f"[yellow]note[/]: {escape(note)}", highlight=False, soft_wrap=True)
        text = f"{self._info.name}  {_outcome(values)}  {_speed(values):,.0f} tok/s"
        self._progress.update(self._bar, completed=step, description=text)
        if step % self._every == 0 or step in (1, self._info.steps):
            self._console.print(self._line(step, values), highlight=False, soft_wrap=True)

    @override
    def rollouts(self, step: int, kind: Kind, groups: Sequence[Group]) -> None:
        """Rollouts are not printed."""

    @override
    def diagnosis(self, step: int, diagnosis: Diagnosis) -> None:
        """Print findings that were not printed before."""
        self._last = diagnosis
        for finding in diagnosis.findings:
            if finding.name not in self._shown and step < self._info.steps:
                self._shown.add(finding.name)
                self._print_finding(finding, f"step {step}: ")

    @override
    def close(self) -> None:
        """Print the diagnosis of the whole run."""
        if self._console.is_terminal:  # otherwise it would print an empty line
            self._progress.stop()
        if summary := self._last.summary:
            none = "" if self._last.findings else "; no findings"
            self._console.print(f"[bold]diagnosis[/]: {escape(summary)}{none}", highlight=False, soft_wrap=True)
        for finding in self._last.findings:
            self._print_finding(finding)

    def _print_finding(self, finding: Finding, when: str = "") -> None:
        color = "red" if finding.severity == "error" else "yellow"
        text = (
            f"[{color}]{finding.severity}[/]: {when}{escape(finding.sentence)} [bold]{escape(finding.change.text)}[/]"
        )
        self._console.print(text, highlight=False, soft_wrap=True)

    def _line(self, step: int, values: Mapping[str, float]) -> str:
        width = len(str(self._info.steps))
        parts = [
            f"step {step:>{width}}/{self._info.steps}",
            _outcome(values) + (_bar(values["reward/mean"]) if "reward/mean" in values else ""),
            *(f"{role} {values[f'reward/{role}/mean']:.3f}" for role in roles_of(values)),
            f"{_speed(values):>6,.0f} tok/s",
            f"{values.get('time/step', 0.0):>5.1f} s",
        ]
        if values.get("rollouts/failed"):
            parts.append(f"[red]{values['rollouts/failed']:.0f} failed[/]")
        if values.get("optim/skipped"):
            parts.append("[yellow]no signal[/]")
        return "  ".join(parts)


def _speed(values: Mapping[str, float]) -> float:
    """Sampled tokens per second; of a step without rollouts, whose evaluations alone sample, those trained on."""
    kind = "sampled" if "reward/mean" in values else "trained"
    return values.get(f"speed/{kind}_tokens_per_second", 0.0)


def _outcome(values: Mapping[str, float]) -> str:
    """Reward of the rollouts, else negative log-likelihood of the demonstrations, else the loss."""
    for name, label in (("reward/mean", "reward"), ("optim/expert_nll", "expert nll"), ("optim/loss", "loss")):
        if name in values:
            return f"{label} {values[name]:6.3f}"
    return "nothing learned"


def _bar(reward: float) -> str:
    filled = round(_BAR * min(max(reward, 0.0), 1.0))
    return f" [green]{'█' * filled}[/][dim]{'░' * (_BAR - filled)}[/]"


def _evaluation(step: int, values: Mapping[str, float], *, right: bool) -> str:
    """pass@k if it measures something (`right`), and the reward where no reward or workflow says what is right."""
    shown = {name: value for name, value in values.items() if "/pass@" in name} if right else {}
    if not values.get("eval/judged") and "eval/reward/mean" in values:
        shown["eval/reward"] = values["eval/reward/mean"]
    passes = "  ".join(f"{name.removeprefix('eval/')} [bold]{value:.3f}[/]" for name, value in shown.items())
    constant = values.get("eval/constant_pass@1" if right else "eval/constant_reward")
    passes += "".join(f"  {role} {values[f'eval/reward/{role}/mean']:.3f}" for role in roles_of(values, "eval/reward"))
    notes = f"  [dim](the best constant answer: {constant:.3f})[/]" if constant is not None else ""
    skills = {_prediction(name): value for name, value in values.items() if name.endswith("/skill")}
    scores = [f"{name} {value:.3f}" for name, value in skills.items() if name.count("/") < 2]  # without parts
    if scores:
        notes += f"\n         skill above a trivial answer: {'  '.join(scores)}"
    if values.get("eval/failed"):
        notes += f"  [red]{values['eval/failed']:.0f} failed[/]"
    when = f"after step {step}" if step else "before training"
    return f"[cyan]held out[/] {when}: {passes}  of {counted(values['eval/tasks'], 'task')}{notes}"


def _prediction(metric: str) -> str:
    """eval/ENVIRONMENT/workflow/X/skill -> ENVIRONMENT/X."""
    return metric.removeprefix("eval/").replace("workflow/", "").removesuffix("/skill")
