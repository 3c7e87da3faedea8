"""A small run with the scripted policy, which has three replies; one of them is rewarded."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from tinsmith.rl.config import RunConfig
from tinsmith.rl.run.loop import train
from tinsmith.testing import ScriptedPolicy

REPLIES = ("no", "yes", "perhaps")


def settings(folder: Path, **changes: Any) -> RunConfig:
    """Settings of a run of 8 steps in `folder`; `changes` replace whole sections."""
    values = {
        "model": {"name": "scripted"},
        "tasks": {"train": {"type": "addition"}, "held_out": 5},
        "rewards": [{"type": "format", "pattern": "yes"}],
        "steps": 8,
        "groups_per_step": 3,
        "group_size": 4,
        "optimizer": {"learning_rate": 0.2},
        "eval": {"every": 4},
        "checkpoint": {"every": 3},
        "monitors": [],
        "name": "small",
        "folder": str(folder),
    }
    return RunConfig.model_validate({**values, **changes})


def scripted(folder: Path):
    """Connect to a scripted policy with its weights in `folder`."""

    async def connect(state: str, version: int) -> ScriptedPolicy:
        return ScriptedPolicy(REPLIES, folder / "weights", state=state, version=version)

    return connect


def run(config: RunConfig, connect=None, console: Console | None = None):
    """Train to the last step and return the final state."""
    return asyncio.run(train(config, connect or scripted(Path(config.folder)), console or Console(file=io.StringIO())))


def rows(folder: Path, *, timeless: bool = True) -> list[dict[str, float]]:
    """Rows of metrics.jsonl, by default without metrics that depend on time."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    time_metrics = ("time/", "speed/")
    return [
        {name: value for name, value in row.items() if not (timeless and name.startswith(time_metrics))}
        for row in lines
    ]


class Killed(BaseException):
    """Stands for SIGKILL: no code under test catches it."""


def breaking(folder: Path, *, calls: int, at: str):
    """Connect to a policy whose method `at` raises Killed after `calls` calls."""
    remaining = [calls]

    async def connect(state: str, version: int):
        policy = ScriptedPolicy(REPLIES, folder / "weights", state=state, version=version)
        method = getattr(policy, at)

        async def killed_call(*args, **kwargs):
            remaining[0] -= 1
            if remaining[0] < 0:
                raise Killed
            return await method(*args, **kwargs)

        setattr(policy, at, killed_call)
        return policy

    return connect
