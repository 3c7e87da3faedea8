"""Five tasks of different kinds, trained with the defaults: `make bench-defaults`.

The run files of this folder set a model, tasks, rewards, the length of a reply and the number of steps, and nothing
else. The runs share one service. benchmarks/results/defaults.{json,md} compare the rewards of held-out tasks
before and after training with that of the best constant answer, and have the diagnosis of each run. Finished runs
are left as they are; delete their folders to train again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from benchmarks import table
from benchmarks.defaults.rows import write_rows
from tinsmith import ServeConfig, embedded
from tinsmith.rl.diagnosis.diagnose import diagnose
from tinsmith.rl.history.run import RunHistory
from tinsmith.rl.record.monitors.jsonl import read_metrics

HERE = Path(__file__).resolve().parent
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
RESULTS = HERE.parent / "results" / "defaults"
KINDS = {
    "addition": "mathematics: two-digit sums",
    "family": "reasoning: relations in a family (reasoning-gym)",
    "records": "format: a sentence as a JSON object",
    "kinds": "classification: which of five kinds of thing a word names",
    "dates": "supervised: dates as YYYY-MM-DD",
}
BASELINE = 1000
"""Constant answers that are tried: all right answers of the held-out tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run has learned: mean rewards of its held-out tasks, and its diagnosis.

    Example: Outcome(name="dates", before=0.0, after=0.9, constant=0.01, tasks=100, steps=30, diagnosis="all 30 …")
    """

    name: str
    before: float
    after: float
    constant: float
    """Reward of the best constant answer."""
    tasks: int
    steps: int
    minutes: float
    """Minutes of the steps, without evaluations."""
    diagnosis: str

    @property
    def learned(self) -> bool:
        """Whether the trained model is better than before and than the best constant answer."""
        return self.after > max(self.constant, self.before)


def main() -> None:
    """Train all runs, one after the other, and write the results after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/defaults"), help="folder of the runs")
    parser.add_argument("--only", nargs="+", choices=list(KINDS), default=list(KINDS), help="these runs")
    parser.add_argument("--model", default=MODEL, help="the model to serve under the name in the files")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="overrides of every run")
    arguments = parser.parse_intermixed_args()
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    write_rows(out)
    with embedded(ServeConfig(models=(f"{MODEL}={arguments.model}",), data=out / "served")) as (url, key):
        environment = {**os.environ, "TINKER_BASE_URL": url, "TINKER_API_KEY": key}
        for name in arguments.only:
            train(name, out, environment, arguments.overrides)
            write_results(out)
    print(RESULTS.with_suffix(".md").read_text())


def train(name: str, out: Path, environment: dict[str, str], overrides: Sequence[str]) -> None:
    """Train one run in the folder `out`/`name`. Exit code 3, finished without an update, is a result too."""
    command = [sys.executable, "-m", "tinsmith", "run", str(HERE / f"{name}.yaml"), f"folder={out / name}"]
    ended = subprocess.run([*command, f"eval.baseline={BASELINE}", *overrides], cwd=out, env=environment, check=False)
    if ended.returncode not in (0, 3):
        sys.exit(f"{name} ended with {ended.returncode}")


def outcome(name: str, folder: Path) -> Outcome | None:
    """The outcome of the run in the folder; None before its second evaluation."""
    rows = read_metrics(folder)
    evaluations = [row for row in rows if "eval/reward/mean" in row]
    if len(evaluations) < 2:
        return None
    first, last = evaluations[0], evaluations[-1]
    rows = [row for row in rows if row["step"] <= last["step"]]
    diagnosis = diagnose(RunHistory(folder).settings, rows)
    return Outcome(
        name=name,
        before=first["eval/reward/mean"],
        after=last["eval/reward/mean"],
        constant=first["eval/constant_reward"],
        tasks=int(last["eval/tasks"]),
        steps=diagnosis.steps,
        minutes=round(sum(row.get("time/step", 0.0) for row in rows) / 60, 1),
        diagnosis=" ".join([f"{diagnosis.summary}.", *(each.sentence for each in diagnosis.findings)]),
    )


def write_results(out: Path) -> None:
    """Write the outcomes of all runs in `out` as JSON and as a table, beside those of runs that are not there."""
    stored = json.loads(RESULTS.with_suffix(".json").read_text())["runs"]
    before = {each.name: each for each in (Outcome(**run) for run in stored)}
    outcomes = [each for name in KINDS if (each := outcome(name, out / name) or before.get(name))]
    learned = sum(each.learned for each in outcomes)
    others = ", ".join(name for name in KINDS if name not in [each.name for each in outcomes])
    missing = f" Not measured: {others}." if others else ""
    made = {
        "measured": f"{datetime.now():%Y-%m-%d}",
        "machine": table.machine(),
        "runs": [asdict(each) for each in outcomes],
    }
    RESULTS.with_suffix(".json").write_text(json.dumps(made, indent=1) + "\n")
    RESULTS.with_suffix(".md").write_text(
        "\n".join(
            [
                "# Five tasks with the defaults (`make bench-defaults`)",
                "",
                "SmolLM2-135M-Instruct; the [run files](../defaults) set a model, tasks, rewards, the length of a reply"
                " and the number of steps. The numbers are mean rewards of held-out tasks, sampled greedily, of the"
                " last evaluation; the best constant answer is the best of all their right answers. "
                f"{learned} of {len(outcomes)} rise above it. A run that was ended counts up to its last "
                f"evaluation.{missing}",
                "",
                f"{made['machine']}, {made['measured']}; minutes of the steps, beside other work.",
                "",
                "| task | steps | before | after | best constant answer | tasks | minutes | diagnosis |",
                "|---|---|---|---|---|---|---|---|",
                *(_row(each) for each in outcomes),
                "",
            ]
        )
    )


def _row(of: Outcome) -> str:
    after = f"**{of.after:.3f}**" if of.learned else f"{of.after:.3f}"
    kind = f"[{of.name}](../defaults/{of.name}.yaml), {KINDS[of.name]}"
    numbers = f"{of.before:.3f} | {after} | {of.constant:.3f} | {of.tasks} | {of.minutes:.1f}"
    return f"| {kind} | {of.steps} | {numbers} | {of.diagnosis} |"


if __name__ == "__main__":
    main()
