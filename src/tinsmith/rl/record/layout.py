"""The run folder: the names of its files and folders, which no other module knows.

    run.yaml            the settings, written at the start
    metrics.jsonl       one row per step (monitors/jsonl.py)
    rollouts/           every rollout: train-000012.jsonl of step 12, eval-000012.jsonl of the evaluation after it
    timeline.jsonl      when each step sampled, trained, evaluated and saved (timeline.py)
    log.txt             the log; log.txt.1 to log.txt.3 are older (logs.py)
    report.html         the report (monitors/report.py)
    comparison.json     the first evaluation against the last, task by task; comparison.tsv as text (comparison.py)
    state.json          the state to resume from; checkpoints/step-000010.json are those of earlier checkpoints
    buffer/             batches between processes that share the folder
    service/            data of the service that the run started
    trackers.json       ids of the run in its trackers; tensorboard/ and wandb/ are files of theirs
    .lock               held by the process of mode train; .lock-PART by the others

A process of another mode has a subfolder, its part, with files of the same names: explore/, explore-NAME/ and bench/,
where results.json has the metrics of each checkpoint. A run in stages has stages.json and a run folder for each stage,
01-NAME/, 02-NAME/.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["train", "eval"]
"""Rollouts of a step, or of an evaluation."""

BENCH = "bench"
"""The part of mode bench."""
_EXPLORE = "explore"


def explore_part(sampler: str) -> str:
    """The part of a process of mode explore, by the name of its sampler."""
    return f"{_EXPLORE}-{sampler}" if sampler else _EXPLORE


@dataclass(frozen=True, slots=True)
class Layout:
    """Paths of the files of a run folder, or of a part of one.

    Example: Layout(Path("runs/demo")).metrics == Path("runs/demo/metrics.jsonl")
    """

    path: Path

    def part(self, name: str) -> Layout:
        """The files of a part; without a name, those of the training process."""
        return Layout(self.path / name)

    def explore_parts(self) -> set[str]:
        """The parts of mode explore that have begun."""
        return {file.parent.name for file in self.path.glob(f"{_EXPLORE}*/{self.settings.name}")}

    def stage(self, number: int, name: str) -> Path:
        """The run folder of a stage, counted from 1."""
        return self.path / f"{number:02}-{name}"

    def lock(self, part: str) -> Path:
        """The file that the process of a part locks."""
        return self.path / (f".lock-{part}" if part else ".lock")

    @property
    def settings(self) -> Path:
        """The settings of the run, as YAML."""
        return self.path / "run.yaml"

    @property
    def metrics(self) -> Path:
        """Metrics as JSON lines."""
        return self.path / "metrics.jsonl"

    @property
    def timeline(self) -> Path:
        """The timeline as JSON lines."""
        return self.path / "timeline.jsonl"

    @property
    def log(self) -> Path:
        """The newest log."""
        return self.path / "log.txt"

    @property
    def report(self) -> Path:
        """The report."""
        return self.path / "report.html"

    @property
    def comparison(self) -> Path:
        """The comparison of evaluations as JSON."""
        return self.path / "comparison.json"

    @property
    def comparison_table(self) -> Path:
        """The comparison of evaluations as a table."""
        return self.path / "comparison.tsv"

    @property
    def results(self) -> Path:
        """The metrics of each checkpoint of mode bench."""
        return self.path / "results.json"

    @property
    def state(self) -> Path:
        """The newest state."""
        return self.path / "state.json"

    @property
    def stages(self) -> Path:
        """The stage in progress, and the final weights of the finished ones."""
        return self.path / "stages.json"

    @property
    def buffer(self) -> Path:
        """The folder of a buffer of type file."""
        return self.path / "buffer"

    @property
    def service(self) -> Path:
        """The data folder of the run's own service."""
        return self.path / "service"

    @property
    def trackers(self) -> Path:
        """The ids of the run in its trackers."""
        return self.path / "trackers.json"

    @property
    def tensorboard(self) -> Path:
        """The folder of TensorBoard's event files."""
        return self.path / "tensorboard"

    @property
    def wandb(self) -> Path:
        """The folder that Weights & Biases makes."""
        return self.path / "wandb"

    @property
    def rollouts_folder(self) -> Path:
        """The folder of the files of rollouts."""
        return self.path / "rollouts"

    def rollouts(self, kind: Kind, step: int) -> Path:
        """The rollouts of a step, or of the evaluation after it."""
        return self.rollouts_folder / f"{kind}-{step:06}.jsonl"

    def steps_with_rollouts(self, kind: Kind) -> list[int]:
        """The steps that have a file of rollouts, in order."""
        return sorted(int(file.stem.removeprefix(f"{kind}-")) for file in self.rollouts_folder.glob(f"{kind}-*.jsonl"))

    @property
    def checkpoints_folder(self) -> Path:
        """The folder of the states of checkpoints."""
        return self.path / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        """The state of the checkpoint after a step."""
        return self.checkpoints_folder / f"step-{step:06}.json"

    def checkpoints(self) -> list[Path]:
        """The states of checkpoints, oldest first."""
        return sorted(self.checkpoints_folder.glob("step-*.json"))

    def unfinished(self) -> list[Path]:
        """Files that a killed process was writing."""
        return [
            file
            for folder in (self.path, self.checkpoints_folder, self.rollouts_folder)
            for file in folder.glob("*.part")
        ]
