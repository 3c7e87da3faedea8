"""Runs steps, each in a process with its time limit, and appends each outcome to a file at once.

The process of a step writes its outcome to a file and ends; a process that is killed, or ends without one, gives an
outcome that says how it ended.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from benchmarks.apart import run_apart
from benchmarks.gpu_check.shapes import Size
from benchmarks.gpu_check.step import Outcome, Step

ERROR_CHARACTERS = 3000
SHORTEST_S = 20.0
"""A step is not begun with less time than this before the deadline."""


def run_all(
    steps: Iterable[Step], command: Callable[[Step, Path], Sequence[str]], into: Path, deadline: float
) -> list[Outcome]:
    """Run the steps one after the other; `command` starts one that writes its outcome to a file. `deadline` is a time
    of time.monotonic(), beyond which no step runs."""
    outcomes = []
    into.parent.mkdir(parents=True, exist_ok=True)
    for step in steps:
        left = deadline - time.monotonic()
        if left < SHORTEST_S:
            outcome = Outcome(step=step.number, name=step.name, ok=False, seconds=0.0, error="the deadline was reached")
        else:
            outcome = _run(step, command, min(step.limit_s, left))
        outcomes.append(outcome)
        with into.open("a") as file:
            file.write(json.dumps(outcome.to_json()) + "\n")
        print(summary(outcome), flush=True)
    return outcomes


def measure(step: Step, size: Size) -> Outcome:
    """Run a step in this process."""
    began = time.monotonic()
    try:
        values = step.measure(size)
    except Exception:  # noqa: BLE001 - any error is the step's outcome
        error = traceback.format_exc()[-ERROR_CHARACTERS:]
        return Outcome(step=step.number, name=step.name, ok=False, seconds=time.monotonic() - began, error=error)
    missed = step.missed(values, tiny=size.tiny)
    return Outcome(
        step=step.number,
        name=step.name,
        ok=not missed,
        seconds=round(time.monotonic() - began, 3),
        values=values,
        missed=missed,
    )


def summary(outcome: Outcome) -> str:
    """The outcome in one line."""
    verdict = "ok" if outcome.ok else "FAILED"
    reason = "; ".join(outcome.missed) or (outcome.error.strip().splitlines() or [""])[-1]
    return f"{outcome.step:>2} {outcome.name:<18} {verdict:<7} {outcome.seconds:6.1f} s  {reason[:150]}".rstrip()


def done(file: Path) -> set[int]:
    """Numbers of the steps that succeeded in an earlier run."""
    if not file.is_file():
        return set()
    outcomes = (json.loads(line) for line in file.read_text().splitlines())
    return {outcome["step"] for outcome in outcomes if outcome["ok"]}


def _run(step: Step, command: Callable[[Step, Path], Sequence[str]], limit_s: float) -> Outcome:
    ending = run_apart(lambda file: command(step, file), limit_s, captures=True)
    if ending.result is not None:
        return Outcome(**json.loads(ending.result))
    error = f"{ending.log[-ERROR_CHARACTERS:]}\n{ending.error}"
    return Outcome(step=step.number, name=step.name, ok=False, seconds=round(ending.seconds, 3), error=error)
