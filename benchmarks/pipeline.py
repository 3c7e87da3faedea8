"""How much sampling and training overlap: seconds of a step.

python -m benchmarks.pipeline            of a policy whose sampling and training take set times: they do not share
                                         a device, both only wait. Groups take 0.5 to 1.5 times the mean
python -m benchmarks.pipeline --model    of SmolLM2 on this machine, where they share the CPU: examples/addition.yaml
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from typing_extensions import override

from tinsmith.rl.config import RunConfig
from tinsmith.rl.optimizer import OptimizerConfig
from tinsmith.rl.policy.sampling import Sample, SampleRequest, SampleResult, Snapshot
from tinsmith.rl.policy.trainer import Update, UpdateResult
from tinsmith.rl.run.loop import train
from tinsmith.testing import ScriptedPolicy

STEPS, GROUPS = 8, 8
WAYS: Mapping[str, dict[str, Any]] = {
    "synchronous": {},
    "staleness 1": {"staleness": 1},
    "synchronous, streamed": {"updates": {"stream": 4}},
    "staleness 1, streamed": {"staleness": 1, "updates": {"stream": 4}},
}

# The same loss in all ways: with staleness the default is another.
MODEL = {"algorithm": {"loss": {"type": "ppo", "clip_high": 0.28}}}


class TimedPolicy(ScriptedPolicy):
    """A policy that waits before it answers."""

    sampling = training = 0.0

    @override
    async def snapshot(self) -> Snapshot:
        return (await super().snapshot()).around_each_request(self._timed)

    async def _timed(self, request: SampleRequest, sample: Sample) -> SampleResult:
        if request.count:
            await asyncio.sleep(self.sampling * (0.5 + request.seed % 1000 / 1000))
        return await sample(request)

    @override
    async def accumulate(self, update: Update) -> UpdateResult:
        await asyncio.sleep(self.training * len(update.rows) / (2 * GROUPS))
        return await super().accumulate(update)

    @override
    async def train(
        self, updates: Sequence[Update], optimizer: OptimizerConfig, learning_rate: float
    ) -> list[UpdateResult]:
        await asyncio.sleep(self.training * sum(len(update.rows) for update in updates) / (2 * GROUPS))
        return await super().train(updates, optimizer, learning_rate)


def seconds_per_step(folder: Path, sampling: float, training: float, way: Mapping[str, Any]) -> float:
    """Mean seconds from one step's end to the next, without the first two steps."""
    config = RunConfig.model_validate(
        {
            "model": {"name": "scripted"},
            "tasks": {"train": {"type": "addition"}},
            "rewards": [{"type": "format", "pattern": "yes"}],
            "steps": STEPS,
            "groups_per_step": GROUPS,
            "group_size": 8,
            "optimizer": {"learning_rate": 1e-6},
            "eval": {"every": 0, "before": False, "after": False},
            "monitors": [],
            "folder": str(folder),
            **way,
        }
    )

    async def connect(state: str, version: int) -> TimedPolicy:
        policy = TimedPolicy(("no", "yes"), folder / "weights", state=state, version=version)
        policy.sampling, policy.training = sampling, training
        return policy

    asyncio.run(train(config, connect, Console(file=io.StringIO())))
    return _seconds_per_step(folder)


def _seconds_per_step(folder: Path) -> float:
    spans = [json.loads(line) for line in (folder / "timeline.jsonl").read_text().splitlines()]
    ends = [span["end"] for span in spans if span["part"] == "publishing"]
    return (ends[-1] - ends[1]) / (len(ends) - 2)


def model_seconds_per_step(folder: Path, way: Mapping[str, Any]) -> float:
    """The same of a run of examples/addition.yaml."""
    keys = {
        "folder": folder,
        "steps": STEPS,
        "eval.before": False,
        "eval.after": False,
        "eval.every": 0,
        **MODEL,
        **way,
    }
    overrides = [
        f"{key}={json.dumps(value) if isinstance(value, dict | bool) else value}" for key, value in keys.items()
    ]
    command = [sys.executable, "-m", "tinsmith", "run", "examples/addition.yaml", *overrides]
    subprocess.run(command, check=True, capture_output=True)
    return _seconds_per_step(folder)


def main() -> None:
    """Print a table of the ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.4, help="mean seconds of a group and of an update")
    parser.add_argument("--model", action="store_true", help="SmolLM2 on this machine, in two turns")
    options = parser.parse_args()
    if options.model:
        print_model_table()
    else:
        print_table(options.seconds)


def print_model_table() -> None:
    """Print a row for each turn; the ways take turns, because the machine may be busier in one of them."""
    print(f"| turn | {' | '.join(WAYS)} |")
    print("| --- |" + " --- |" * len(WAYS))
    for turn in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            cells = [
                model_seconds_per_step(Path(folder) / str(number), way) for number, way in enumerate(WAYS.values())
            ]
        print(f"| {turn} | {' | '.join(f'{seconds:.2f} s' for seconds in cells)} |", flush=True)


def print_table(seconds: float) -> None:
    """Print a row for each ratio of sampling to training."""
    print(f"| sampling : training | {' | '.join(WAYS)} |")
    print("| --- |" + " --- |" * len(WAYS))
    for sampling, training in ((1.0, 1.0), (2.0, 1.0), (1.0, 2.0)):
        cells = []
        for way in WAYS.values():
            with tempfile.TemporaryDirectory() as folder:
                cells.append(
                    f"{seconds_per_step(Path(folder) / 'run', sampling * seconds, training * seconds, way):.2f} s"
                )
        print(f"| {sampling:g} : {training:g} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
