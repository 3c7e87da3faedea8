"""The run folder: the names of its files and folders, which no other module knows.

A process of another mode than the training has a part of the folder, with files of the same names: explore/,
explore-NAME/ and bench/. A run in stages has a run folder for each stage: 01-NAME/, 02-NAME/.
"""

from __future__ import annotations

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


class Layout:
    """Paths of the files of a run folder, or of a part of one.

    Example: Layout(Path("runs/demo")).metrics == Path("runs/demo/metrics.jsonl")
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.settings = path / "run.yaml"
        """The settings, written at the start."""
        self.metrics = path / "metrics.jsonl"
        """A row for each step and evaluation (monitors/jsonl.py)."""
        self.rollouts_folder = path / "rollouts"
        """Every rollout (monitors/jsonl.py)."""
        self.benchmarks_folder = path / "benchmarks"
        """The scores of benchmarks, by problem (evaluation/benchmarks.py)."""
        self.rollout_index = path / "rollouts-index.sqlite"
        """The index of the rollouts (history/index.py)."""
        self.timeline = path / "timeline.jsonl"
        """When each step sampled, trained, evaluated and saved (timeline.py)."""
        self.log = path / "log.txt"
        """The log; log.txt.1 to log.txt.3 are older (logs.py)."""
        self.report = path / "report.html"
        """The report (monitors/report.py)."""
        self.comparison, self.comparison_table = path / "comparison.json", path / "comparison.tsv"
        """The first evaluation against the last, or the checkpoints of mode bench (comparison.py)."""
        self.results = path / "results.json"
        """The metrics of each checkpoint of mode bench."""
        self.state, self.checkpoints_folder = path / "state.json", path / "checkpoints"
        """The newest state to resume from, and those of earlier checkpoints (run/state.py)."""
        self.stages = path / "stages.json"
        """The stage in progress, and the final weights of the finished ones."""
        self.buffer = path / "buffer"
        """Batches between processes that share the folder."""
        self.service = path / "service"
        """The data folder of the service that the run started."""
        self.trackers, self.tensorboard, self.wandb = path / "trackers.json", path / "tensorboard", path / "wandb"
        """The ids of the run in its trackers, and files of theirs."""

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
        """The file that the process of a part holds locked."""
        return self.path / (f".lock-{part}" if part else ".lock")

    def rollouts(self, kind: Kind, step: int) -> Path:
        """The rollouts of a step, or of the evaluation after it."""
        return self.rollouts_folder / f"{kind}-{step:06}.jsonl"

    def benchmarks(self, step: int) -> Path:
        """The scores of the benchmarks after a step."""
        return self.benchmarks_folder / f"step-{step:06}.json"

    def steps_with_rollouts(self, kind: Kind) -> list[int]:
        """The steps that have a file of rollouts, in order."""
        names = (file.stem.removeprefix(f"{kind}-") for file in self.rollouts_folder.glob(f"{kind}-*.jsonl"))
        return sorted(int(name) for name in names if name.isascii() and name.isdigit())

    def checkpoint(self, step: int) -> Path:
        """The state of the checkpoint after a step."""
        return self.checkpoints_folder / f"step-{step:06}.json"

    def checkpoints(self) -> list[Path]:
        """The states of checkpoints, oldest first."""
        return sorted(self.checkpoints_folder.glob("step-*.json"))

    def unfinished(self) -> list[Path]:
        """Files that a killed process was writing."""
        folders = (self.path, self.checkpoints_folder, self.rollouts_folder)
        return [file for folder in folders for file in folder.glob("*.part")]
