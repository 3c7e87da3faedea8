"""Small runs whose results are recorded: each style of sampling, two processes, stages, environments, foreign files.

A run uses the scripted policy on a virtual clock, whose samples and updates take seconds that depend on their seeds
alone. What would run in a thread runs at once, so that the order of everything is the same on every machine.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from rich.console import Console
from typing_extensions import override

from tests.rl.scripted_run import settings
from tinsmith.dialects import read_run
from tinsmith.rl.config import RunConfig
from tinsmith.rl.explore import explore
from tinsmith.rl.optimizer import OptimizerConfig
from tinsmith.rl.policy.sampling import Sample, SampleRequest, SampleResult
from tinsmith.rl.policy.trainer import Update, UpdateResult
from tinsmith.rl.stages import run_stages
from tinsmith.testing import ScriptedPolicy, run_virtually

REPLIES = ("no", "yes", "perhaps", "1, 2, 3, 4, 5", "FINAL ANSWER: 7\nCONFIDENCE: 0.2", "it is \\boxed{4}")
UPDATE_SECONDS = 2.0
REPLAY = {"enable": True, "cooldown": 0, "decay": 1, "size": 4}
REWARD = 'rewards=[{type: format, pattern: "yes"}]'
"""In place of the rewards of foreign files, which other processes compute."""


async def timed(request: SampleRequest, sample: Sample) -> SampleResult:
    """Samples take between 0.1 and 8 seconds."""
    result = await sample(request)
    if request.count:
        await asyncio.sleep(0.1 + float(np.random.default_rng(abs(request.seed) + 1).integers(80)) / 10)
    return result


class TimedPolicy(ScriptedPolicy):
    """A policy whose updates take UPDATE_SECONDS."""

    @override
    async def train(
        self, updates: Sequence[Update], optimizer: OptimizerConfig, learning_rate: float
    ) -> list[UpdateResult]:
        await asyncio.sleep(UPDATE_SECONDS)
        return await super().train(updates, optimizer, learning_rate)


def _styled(style: str, **changes: Any) -> Callable[[Path], RunConfig]:
    def config(folder: Path) -> RunConfig:
        return settings(folder / "run", sync={"style": style}, **changes)

    return config


def _staged(folder: Path) -> RunConfig:
    stages = [
        {"name": "first", "steps": 3, "rewards": [{"type": "format", "pattern": "perhaps"}]},
        {"name": "second", "steps": 4, "keep_optimizer": True, "staleness": 1},
    ]
    return settings(folder / "run", stages=stages)


def _several_environments(folder: Path) -> RunConfig:
    values = settings(folder / "run").model_dump(exclude_unset=True, exclude={"tasks", "rewards"})
    rewards = [{"type": "format", "pattern": "yes"}]
    environments = [
        {"type": "tasks", "name": "sums", "train": {"type": "addition"}, "held_out": 3, "rewards": rewards},
        {"type": "tasks", "name": "most", "weight": 2, "train": {"type": "largest"}, "rewards": rewards},
    ]
    return RunConfig.model_validate({**values, "environments": environments})


def _filtered(folder: Path) -> RunConfig:
    filters = [{"type": "reward_std"}]
    return settings(
        folder / "run",
        staleness=2,
        filters=filters,
        filter_refills=6,
        until={"metric": "reward/mean", "at_least": 0.55},
    )


def _foreign(name: str, text: str | Mapping[str, Any], *overrides: str) -> Callable[[Path], RunConfig]:
    def config(folder: Path) -> RunConfig:
        folder.mkdir(parents=True, exist_ok=True)
        rows = [{"question": f"{n} + 1?", "answer": f"#### {n + 1}", "ground_truth": str(n % 2 + 4)} for n in range(20)]
        (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        file = folder / name
        content = text if isinstance(text, str) else yaml.safe_dump(text)
        file.write_text(content.replace("FOLDER", str(folder)))
        return read_run(file, (*overrides, "monitors=[]", f"folder={folder}/run")).settings

    return config


TRINITY = {
    "project": "recorded",
    "checkpoint_root_dir": "FOLDER",
    "algorithm": {"algorithm_type": "grpo", "repeat_times": 4, "optimizer": {"lr": 0.2}},
    "model": {"model_path": "tiny", "max_prompt_tokens": 999, "max_response_tokens": 32, "tinker": {"enable": True}},
    "buffer": {
        "batch_size": 3,
        "total_steps": 4,
        "explorer_input": {
            "taskset": {
                "path": "FOLDER/rows.jsonl",
                "format": {"prompt_key": "question", "response_key": "answer"},
            },
            "default_workflow_type": "math_workflow",
        },
    },
    "synchronizer": {"sync_method": "checkpoint", "sync_interval": 2},
}
RLLM = {
    "model": {"name": "tiny", "lora_rank": 8},
    "training": {"group_size": 4, "learning_rate": 0.2},
    "sampling": {"temperature": 1.0, "top_p": 1.0},
    "data": {
        "train_files": "FOLDER/rows.jsonl",
        "train_batch_size": 5,
        "max_prompt_length": 999,
        "max_response_length": 32,
    },
    "trainer": {"total_epochs": 1, "experiment_name": "recorded"},
}
MINDS = """
[[envs]]
id = "./environments/ghost_trace"
weight = 2.0

[[envs]]
id = "./environments/self_prediction"

[trainer]
rollouts_per_example = 4
groups_per_batch = 3
total_batches = 4
learning_rate = 0.2
async_off_policy_steps = 1
eval_every = 2

[model]
base_model = "tiny"
"""

CASES: dict[str, Callable[[Path], RunConfig]] = {
    "fixed": _styled("fixed"),
    "fixed_stale": _styled("fixed", staleness=2, checkpoint={"every": 2, "keep": 2}),
    "on_publish": _styled("on_publish", staleness=2),
    "live": _styled("live", buffer={"type": "memory", "capacity": 4}),
    "replay": _styled("live", buffer={"type": "memory", "capacity": 3, "replay": REPLAY}),
    "filters": _filtered,
    "stages": _staged,
    "environments": _several_environments,
    "two_processes": _styled("fixed", staleness=1, buffer={"type": "file"}, mode="train"),
    "trinity": _foreign("trinity.yaml", TRINITY, REWARD, "algorithm.loss={type: importance_sampling}"),
    "rllm": _foreign("rllm.yaml", RLLM, REWARD),
    "minds": _foreign("minds.toml", MINDS),
}


def record(name: str, folder: Path) -> dict[str, Any]:
    """Run a case in `folder`, and return what is compared: metrics and rollouts of each run, and checkpoints."""
    run_virtually(_run(CASES[name](folder), folder), threads=False)
    runs = sorted(file.parent for file in folder.rglob("metrics.jsonl"))
    weights = sorted((folder / "weights").glob("*.json"))
    return {
        "runs": {str(run.relative_to(folder)): _results(run) for run in runs},
        "weights": {file.stem: [rounded(value) for value in json.loads(file.read_text())] for file in weights},
    }


async def _run(config: RunConfig, folder: Path) -> None:
    console = Console(file=io.StringIO())

    def policy(state: str = "", version: int = 0) -> TimedPolicy:
        return TimedPolicy(REPLIES, folder / "weights", state=state, version=version, middleware=(timed,))

    async def connect(state: str, version: int) -> TimedPolicy:
        return policy(state, version)

    async def connect_sampler() -> TimedPolicy:
        return policy()

    training = run_stages(config, lambda stage: connect, console)
    if config.mode == "train":
        sampler = config.model_copy(update={"mode": "explore"})
        await asyncio.gather(explore(sampler, connect_sampler, console), training)
    else:
        await training


def _results(run: Path) -> dict[str, Any]:
    metrics: dict[str, list[Any]] = {}
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for at, row in enumerate(rows):
        for name, value in row.items():
            if not name.startswith(("time/", "speed/")):
                metrics.setdefault(name, [None] * len(rows))[at] = rounded(value)
    return {
        "metrics": dict(sorted(metrics.items())),
        "rollouts": {file.stem: _digest(file) for file in sorted((run / "rollouts").glob("*.jsonl"))},
    }


def rounded(value: float) -> float:
    """The value with six digits: the last bits of exp and log differ between machines."""
    return value if isinstance(value, int) or not math.isfinite(value) else float(f"{value:.6g}")


def _digest(file: Path) -> str:
    """A hash of the stored rollouts, with numbers rounded. Logprobs of the trainer are sums whose last digits differ
    between machines; of them the number counts."""
    rows = [json.loads(line, parse_float=lambda text: rounded(float(text))) for line in file.read_text().splitlines()]
    for turn in (turn for row in rows for trajectory in row["trajectories"] for turn in trajectory["turns"]):
        turn["trainer_logprobs"] = turn["trainer_logprobs"] and len(turn["trainer_logprobs"])
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()[:16]
