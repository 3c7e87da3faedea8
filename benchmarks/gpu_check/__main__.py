"""Command line of the check; the exit status is the number of steps that failed."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from pathlib import Path

import torch

from benchmarks.gpu_check import report, runner
from benchmarks.gpu_check.shapes import Size
from benchmarks.gpu_check.step import Step
from benchmarks.gpu_check.steps import STEPS


def main() -> None:
    """Run the chosen steps and write their outcomes, or measure one step in this process (--measure)."""
    arguments = _arguments()
    size = Size(tiny=arguments.tiny)
    if arguments.measure is not None:
        outcome = runner.measure(STEPS[arguments.measure], size)
        arguments.outcome.write_text(json.dumps(outcome.to_json()))
        return
    if not size.tiny and not torch.cuda.is_available():
        print("PyTorch finds no GPU, so nothing was checked. With --tiny, the steps run with tiny shapes on a CPU.")
        print("\n".join(f"{step.number:>2} {step.name}" for step in STEPS))
        sys.exit(0 if arguments.without_gpu_ok else 1)
    chosen = _chosen(arguments.steps) - (runner.done(arguments.skip_done) if arguments.skip_done else set())
    steps = [step for step in STEPS if step.number in chosen]

    def command(step: Step, outcome: Path) -> list[str]:
        here = [sys.executable, "-m", "benchmarks.gpu_check", "--measure", str(step.number), "--outcome", str(outcome)]
        return [*here, *(["--tiny"] if size.tiny else [])]

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the step in progress ends too
    outcomes = runner.run_all(steps, command, arguments.into, time.monotonic() + arguments.deadline)
    print("\n".join(["", *(runner.summary(outcome) for outcome in outcomes)]))
    if not size.tiny:
        file = report.save(outcomes)
        print(f"Results: {file}")
        if (last := report.last_before(file)) is not None:
            print("\n".join([f"Changed since {last.name}:", *report.changes(report.read(last), report.read(file))]))
    sys.exit(sum(not outcome.ok for outcome in outcomes))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__)
    parser.add_argument("--steps", default=f"0-{len(STEPS) - 1}", help="numbers and ranges, such as 0-6,9")
    parser.add_argument("--into", type=Path, default=Path("gpu-check.jsonl"), help="one line of JSON for each step")
    parser.add_argument("--skip-done", type=Path, help="skip the steps that succeeded in this file of an earlier run")
    parser.add_argument("--deadline", type=float, default=3600.0, help="seconds after which no step runs")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on a CPU; the figures mean nothing")
    parser.add_argument("--without-gpu-ok", action="store_true", help="exit with 0 where there is no GPU")
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--outcome", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def _chosen(text: str) -> set[int]:
    """The numbers that a text such as 0-6,9 names."""
    numbers: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers |= set(range(int(first), int(last or first) + 1))
    return numbers


if __name__ == "__main__":
    main()
